//! A conversation that continues from what a cache holds.

use super::{Message, TextError, Tokenizer};
use crate::cache::CacheBackend;

/// A conversation of one sequence. Each turn hands the cache what it does not hold yet, and nothing else.
///
/// The template is applied to all messages. What it adds to the text so far is encoded alone, and follows the ids that
/// are there: a reply keeps the ids that were generated, even if its text encodes to others. A template that changes
/// earlier text (it may leave out thoughts) costs the tokens from there on: the cache is truncated to the common prefix
/// of ids, or cleared if it refuses that.
///
/// ```
/// use burn::tensor::Device;
/// use kv_direct::generate::Generation;
/// use kv_direct::text::{Chat, Message, TextGeneration, Tokenizer};
/// use kv_direct::{FullKv, pretrained::load};
///
/// let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/tiny");
/// let (model, tokenizer) = (load(dir, &Device::flex())?, Tokenizer::from_dir(dir)?);
/// let mut cache = FullKv::new(&model.decoder.shape());
///
/// let mut chat = Chat::new(&tokenizer);
/// for question in ["Why is the sky blue?", "And at night?"] {
///     chat.push(Message::new("user", question));
///     let new = chat.prompt(&mut cache)?;
///     let ids = Generation::new(&model.decoder, &mut cache, &new)?.with_eos(&model.eos).with_max_new(8);
///     let mut reply = TextGeneration::new(ids, &tokenizer);
///     let text: String = reply.by_ref().collect::<Result<_, _>>()?;
///     chat.push_reply(text, reply.ids())?;
/// }
/// // The second turn processed the last id of the first reply, and what the template added.
/// assert_eq!(cache.lengths()[0], chat.ids().len() - 1);
/// assert_eq!(chat.messages().len(), 4);
/// # use kv_direct::CacheBackend;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Chat<'a> {
    tokenizer: &'a Tokenizer,
    messages: Vec<Message>,
    /// The rendered messages, up to the last prompt or reply.
    text: String,
    /// The ids of `text`, as they were processed or generated.
    ids: Vec<u32>,
}

impl<'a> Chat<'a> {
    /// A conversation without messages, for an empty cache.
    #[must_use]
    pub const fn new(tokenizer: &'a Tokenizer) -> Self {
        Self {
            tokenizer,
            messages: Vec::new(),
            text: String::new(),
            ids: Vec::new(),
        }
    }

    /// Adds a message of the user, the system or a tool.
    pub fn push(&mut self, message: Message) {
        self.messages.push(message);
    }

    /// All messages, replies included.
    #[must_use]
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// The ids of the conversation up to the last prompt or reply.
    #[must_use]
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The ids that the next reply starts from: those that the cache has not processed, at least one. The cache holds
    /// the rest afterwards, and must be the one of the turns before, or empty.
    ///
    /// # Errors
    /// Those of [`Tokenizer::render`], and [`TextError::Encode`]. The cache is then as it was.
    pub fn prompt<C>(&mut self, cache: &mut C) -> Result<Vec<u32>, TextError>
    where
        C: CacheBackend + ?Sized,
    {
        let text = self.tokenizer.render(&self.messages, true)?;
        let ids = match text.strip_prefix(&self.text) {
            Some(rest) => [&self.ids[..], &self.tokenizer.encode_plain(rest)?].concat(),
            None => self.tokenizer.encode_plain(&text)?,
        };
        let processed = cache.lengths().first().copied().unwrap_or(0);
        let held = &self.ids[..processed.min(self.ids.len())];
        let same = held.iter().zip(&ids).take_while(|(a, b)| a == b).count();
        // One id at least has to be processed: its logits choose the first of the reply.
        let mut keep = same.min(ids.len().saturating_sub(1));
        if processed > 0 && cache.truncate(&[keep]).is_err() {
            cache.clear();
            keep = 0;
        }
        (self.text, self.ids) = (text, ids);
        Ok(self.ids[keep..].to_vec())
    }

    /// Adds the reply to the last prompt: its text, and all ids that were generated.
    ///
    /// # Errors
    /// [`TextError::Decode`].
    pub fn push_reply(&mut self, text: impl Into<String>, ids: &[u32]) -> Result<(), TextError> {
        let text = text.into();
        // The template writes the token that ends a reply, so the last id stays out if it has no text. After a stop
        // string the ids have more text than the reply: they are encoded anew.
        let but_last = ids.split_last().map_or(ids, |(_, rest)| rest);
        for ids in [but_last, ids] {
            if self.tokenizer.decode(ids)? == text {
                self.text += &text;
                self.ids.extend(ids);
                break;
            }
        }
        self.messages.push(Message::new("assistant", text));
        Ok(())
    }
}
