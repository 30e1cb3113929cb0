//! Text in and out: the tokenizer and the chat template of a model folder, streamed text, and stop strings.
//!
//! ```
//! use burn::tensor::Device;
//! use kv_direct::{
//!     FullKv,
//!     generate::Generation,
//!     pretrained::load,
//!     text::{TextGeneration, Tokenizer},
//! };
//!
//! let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/tiny");
//! let (tokenizer, model) = (Tokenizer::from_dir(dir)?, load(dir, &Device::flex())?);
//! let mut cache = FullKv::new(&model.decoder.shape());
//!
//! let prompt = tokenizer.encode("Once upon a time")?;
//! let ids = Generation::new(&model.decoder, &mut cache, &prompt)?.with_max_new(8);
//! for piece in TextGeneration::new(ids, &tokenizer).with_stop("\n")? {
//!     print!("{}", piece?);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod chat;
mod config;
mod conversation;
mod error;
mod generation;
mod stops;
mod stream;
mod template;
mod vocabulary;

use std::{fmt, path::Path};

use minijinja::{Value, value::Serde};
use serde::Serialize;

pub use self::{
    chat::Message, conversation::Chat, error::TextError, generation::TextGeneration, stops::Stops,
    stream::TextStream,
};
use self::{config::Config, template::Template, vocabulary::Vocabulary};
use crate::files;

/// The tokenizer of a model folder: converts text to ids and back.
pub struct Tokenizer {
    inner: Vocabulary,
    /// The id that begins a text, if the folder names one.
    bos: Option<u32>,
    /// The id that ends a text, if the folder names one.
    eos: Option<u32>,
    /// Whether the folder requires it in front of raw text.
    add_bos: bool,
    template: Template,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("bos", &self.bos)
            .field("add_bos", &self.add_bos)
            .field("template", &self.template)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads `tokenizer.json` and, if they exist, `tokenizer_config.json`, `special_tokens_map.json` and
    /// `chat_template.jinja`. The latter replaces the template in `tokenizer_config.json`. Truncation and padding in
    /// `tokenizer.json` are switched off.
    ///
    /// # Errors
    /// [`TextError`], which names the file. A bad chat template is an error of [`render`](Self::render).
    ///
    /// ```
    /// use kv_direct::text::Tokenizer;
    ///
    /// let tokenizer = Tokenizer::from_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/tiny"))?;
    /// let ids = tokenizer.encode("fox")?;
    /// assert_eq!(tokenizer.decode(&ids)?, "fox");
    /// # Ok::<(), kv_direct::text::TextError>(())
    /// ```
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Self, TextError> {
        let dir = dir.as_ref();
        let path = dir.join("tokenizer.json");
        let bytes = files::read(&path).map_err(|source| TextError::Io {
            path: path.clone(),
            source,
        })?;
        let bad = |source| TextError::Tokenizer {
            path: path.clone(),
            source,
        };
        let inner = Vocabulary::from_bytes(bytes).map_err(bad)?;
        let config = Config::read(dir)?;
        let id = |name| config.token(name).and_then(|token| inner.id(token));
        let (bos, eos) = (id("bos_token"), id("eos_token"));
        let token = config.token("bos_token").filter(|_| bos.is_none());
        if let Some(token) = token.filter(|_| config.add_bos) {
            return Err(TextError::UnknownBos {
                path: dir.join("tokenizer_config.json"),
                token: token.to_owned(),
            });
        }
        Ok(Self {
            inner,
            bos,
            eos,
            add_bos: config.add_bos,
            template: Template::new(dir, config.template, config.tokens),
        })
    }

    /// The ids of raw text, with the special tokens that the tokenizer puts around a text.
    ///
    /// Exactly one begin-of-text id comes first if the folder names that token, and `tokenizer.json` or `add_bos_token`
    /// requires one. A text that begins with that token's own string does not get a second one, as it does in
    /// transformers. transformers also ignores `add_bos_token` if there is a `tokenizer.json`. Here `true` adds the
    /// token, and `false` leaves the decision to `tokenizer.json`.
    ///
    /// # Errors
    /// [`TextError::Encode`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let encoding = self.inner.encode(text, true);
        let encoding = encoding.map_err(|source| TextError::Encode { source })?;
        let mut ids = encoding.get_ids().to_vec();
        let Some(bos) = self.bos else {
            return Ok(ids);
        };
        // The mask is 1 if an id does not come from the text.
        let put = ids.first() == Some(&bos) && encoding.get_special_tokens_mask()[0] == 1;
        let own = ids.get(usize::from(put)) == Some(&bos);
        if put && own {
            ids.remove(0);
        } else if self.add_bos && !put && !own {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// The ids of a part of a text: no special token is added at its ends. What follows in a conversation is encoded so.
    ///
    /// # Errors
    /// [`TextError::Encode`].
    ///
    /// ```
    /// use kv_direct::text::Tokenizer;
    ///
    /// let tokenizer = Tokenizer::from_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/tiny"))?;
    /// let ids = tokenizer.encode_plain(" and a fox")?;
    /// assert_eq!(tokenizer.decode(&ids)?, " and a fox");
    /// # Ok::<(), kv_direct::text::TextError>(())
    /// ```
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let encoding = self.inner.encode(text, false);
        let encoding = encoding.map_err(|source| TextError::Encode { source })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of `ids`, without special tokens and ids outside the vocabulary. Bytes that are not UTF-8 become
    /// U+FFFD.
    ///
    /// # Errors
    /// [`TextError::Decode`].
    pub fn decode(&self, ids: &[u32]) -> Result<String, TextError> {
        // Some decoders of the tokenizers crate fail on an empty list.
        if ids.iter().all(|&id| self.inner.shown(id).is_none()) {
            return Ok(String::new());
        }
        let text = self.inner.decode(ids);
        text.map_err(|source| TextError::Decode { source })
    }

    /// A stream that decodes ids one by one.
    #[must_use]
    pub const fn stream(&self) -> TextStream<'_> {
        TextStream::new(self)
    }

    /// Renders `messages` with the folder's chat template, as transformers does. With `add_generation_prompt`, the
    /// opening of a reply follows.
    ///
    /// Nothing in a message is escaped: a message that contains the string of a special token yields that token.
    ///
    /// # Errors
    /// [`TextError::NoTemplate`], [`TextError::Raised`] if the template refuses the messages, [`TextError::Template`]
    /// if the template itself is wrong.
    ///
    /// A template has limits on its size, depth, steps and bytes, far above what published templates need. Beyond them it
    /// is wrong.
    ///
    /// # Cost
    /// Every call parses the template, on a thread of its own.
    ///
    /// ```
    /// use kv_direct::text::{Message, Tokenizer};
    ///
    /// let tokenizer = Tokenizer::from_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/tiny"))?;
    /// let text = tokenizer.render(&[Message::new("user", "Hi")], true)?;
    /// assert_eq!(text, "user: Hi\nassistant: ");
    /// # Ok::<(), kv_direct::text::TextError>(())
    /// ```
    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String, TextError> {
        let none = Value::from_iter::<[(&str, ()); 0]>([]);
        self.template.render(messages, add_generation_prompt, none)
    }

    /// As [`render`](Self::render), with variables of the caller's own: a map or a structure, such as `tools`,
    /// `documents` or `enable_thinking`. They take the place of special tokens of the same name, but not of `messages`
    /// and `add_generation_prompt`. [`encode_plain`](Self::encode_plain) gives the ids of the text.
    ///
    /// # Errors
    /// As [`render`](Self::render).
    ///
    /// ```
    /// use std::collections::BTreeMap;
    ///
    /// use kv_direct::text::{Message, Tokenizer};
    ///
    /// let tokenizer = Tokenizer::from_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/tiny"))?;
    /// let variables = BTreeMap::from([("enable_thinking", false)]);
    /// let text = tokenizer.render_with(&[Message::new("user", "Hi")], true, &variables)?;
    /// # Ok::<(), kv_direct::text::TextError>(())
    /// ```
    pub fn render_with(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        variables: &(impl Serialize + ?Sized),
    ) -> Result<String, TextError> {
        let variables = Value::from(Serde(variables));
        self.template
            .render(messages, add_generation_prompt, variables)
    }

    /// The ids of the text that [`render`](Self::render) returns. No special tokens are added: a template contains
    /// its own.
    ///
    /// # Errors
    /// As [`render`](Self::render), and [`TextError::Encode`].
    pub fn encode_chat(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>, TextError> {
        self.encode_plain(&self.render(messages, add_generation_prompt)?)
    }

    /// The id that ends a text, if the folder names such a token. `generation_config.json` may name others.
    #[must_use]
    pub const fn eos(&self) -> Option<u32> {
        self.eos
    }
}
