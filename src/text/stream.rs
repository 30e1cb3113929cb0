//! Text from ids that come one by one.

use super::{TextError, Tokenizer};

/// What stands for bytes that are no character, or not yet.
const REPLACEMENT: char = '\u{FFFD}';

/// Incremental decoding: pieces that together are the [`decode`](Tokenizer::decode) of all ids,
/// with no character shown before it is whole.
///
/// ```
/// use kv_direct::text::Tokenizer;
///
/// let tokenizer = Tokenizer::from_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/tiny"))?;
/// let mut stream = tokenizer.stream();
/// // Three ids, one for every byte.
/// let ids = tokenizer.encode("\u{20ac}")?;
/// assert_eq!(stream.push(ids[0])?, "");
/// assert_eq!(stream.push(ids[1])?, "");
/// assert_eq!(stream.push(ids[2])?, "\u{20ac}");
/// assert_eq!(stream.finish()?, "");
/// # Ok::<(), kv_direct::text::TextError>(())
/// ```
// Not the `DecodeStream` of tokenizers: it has no end, so the bytes of a character that was cut off
// are lost; and it shows each byte token by itself, although bytes that turn out to be no UTF-8
// replace the whole run of byte tokens, so it fails there.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The ids since before the last place where the text was whole.
    ids: Vec<u32>,
    /// How many of them came before that place. How a token decodes depends on its neighbour.
    context: usize,
    /// The text of `ids` that was shown.
    shown: String,
}

impl<'a> TextStream<'a> {
    pub(super) const fn new(tokenizer: &'a Tokenizer) -> Self {
        Self {
            tokenizer,
            ids: Vec::new(),
            context: 0,
            shown: String::new(),
        }
    }

    /// Takes the next id and answers the text that is now certain, often none.
    ///
    /// # Errors
    /// [`TextError::Decode`], [`TextError::Unstable`].
    ///
    /// # Cost
    /// Decodes the ids since the last whole character but one.
    pub fn push(&mut self, id: u32) -> Result<String, TextError> {
        let Some(token) = self.tokenizer.shown(id) else {
            return Ok(String::new());
        };
        self.ids.push(id);
        // A run of byte tokens becomes text all at once, when it ends.
        if is_byte(&token) {
            return Ok(String::new());
        }
        let text = self.tokenizer.decode(&self.ids)?;
        // The last replacement may still become a character; those before it stay.
        let cut = text.strip_suffix(REPLACEMENT);
        let piece = self.unseen(cut.unwrap_or(&text))?;
        if cut.is_none() && !piece.is_empty() {
            self.ids.drain(..self.context);
            self.context = self.ids.len();
            self.shown = self.tokenizer.decode(&self.ids)?;
        } else {
            self.shown.push_str(&piece);
        }
        Ok(piece)
    }

    /// What is left when no id follows: bytes that became no character. Afterwards the stream begins
    /// anew.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn finish(&mut self) -> Result<String, TextError> {
        let text = self.tokenizer.decode(&self.ids)?;
        let piece = self.unseen(&text);
        *self = Self::new(self.tokenizer);
        piece
    }

    /// The part of `text` behind what was shown.
    fn unseen(&self, text: &str) -> Result<String, TextError> {
        match text.strip_prefix(&self.shown) {
            Some(piece) => Ok(piece.to_owned()),
            None => Err(TextError::Unstable {
                shown: self.shown.clone(),
                found: text.to_owned(),
            }),
        }
    }
}

/// Whether a token stands for one byte, in the spelling that tokenizers decodes.
fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>'));
    digits.is_some_and(|d| d.len() == 2 && u8::from_str_radix(d, 16).is_ok())
}
