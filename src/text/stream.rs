//! Text decoded from ids one by one.

use super::{TextError, Tokenizer};

/// Stands for bytes that are not a character, or not yet.
const REPLACEMENT: char = '\u{FFFD}';

/// Incremental decoding. The pieces together are the [`decode`](Tokenizer::decode) of all ids. No character is
/// returned before it is complete.
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
// Not the `DecodeStream` of the tokenizers crate, for two reasons. It has no end, so the bytes of a character that
// was cut off are lost. And it returns each byte token by itself. If the bytes turn out not to be UTF-8, the whole
// run of byte tokens decodes to something else, and the stream fails.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The ids since the last place where the text was complete, and some before it.
    ids: Vec<u32>,
    /// How many of them come before that place. They are needed because a token's text depends on its neighbour.
    context: usize,
    /// The text of `ids` that was returned.
    shown: String,
    /// Where tokens are nothing but bytes: those that are not a character yet. Then the other fields stay empty.
    bytes: Vec<u8>,
}

impl<'a> TextStream<'a> {
    pub(super) const fn new(tokenizer: &'a Tokenizer) -> Self {
        Self {
            tokenizer,
            ids: Vec::new(),
            context: 0,
            shown: String::new(),
            bytes: Vec::new(),
        }
    }

    /// Appends the next id and returns the text that is now certain, often none.
    ///
    /// # Errors
    /// [`TextError::Decode`], [`TextError::Unstable`].
    ///
    /// # Cost
    /// Decodes the ids since the last but one place where the text was complete. Where tokens are nothing but bytes, this
    /// one only.
    pub fn push(&mut self, id: u32) -> Result<String, TextError> {
        if let Some(bytes) = self.tokenizer.inner.token_bytes(id) {
            self.bytes.extend(bytes);
            return Ok(take_characters(&mut self.bytes));
        }
        let Some(token) = self.tokenizer.inner.shown(id) else {
            return Ok(String::new());
        };
        self.ids.push(id);
        // A run of byte tokens becomes text all at once, when it ends.
        if is_byte(&token) {
            return Ok(String::new());
        }
        let text = self.tokenizer.decode(&self.ids)?;
        // The last replacement character may still become another one; those before it stay.
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

    /// Ends the text and returns the rest: bytes that did not become a character. Afterwards the stream is as new.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn finish(&mut self) -> Result<String, TextError> {
        if !self.bytes.is_empty() {
            let rest = std::mem::take(&mut self.bytes);
            return Ok(String::from_utf8_lossy(&rest).into_owned());
        }
        let text = self.tokenizer.decode(&self.ids)?;
        let piece = self.unseen(&text);
        *self = Self::new(self.tokenizer);
        piece
    }

    /// The part of `text` after what was returned.
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

/// Takes the bytes of all characters that are complete. Bytes that are no character become U+FFFD, unless more of them
/// could make one.
fn take_characters(bytes: &mut Vec<u8>) -> String {
    let (mut text, mut taken) = (String::new(), 0);
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        taken += chunk.valid().len();
        let invalid = chunk.invalid();
        let error = std::str::from_utf8(invalid).err();
        let unfinished = error.is_some_and(|error| error.error_len().is_none());
        let last = taken + invalid.len() == bytes.len();
        if !(invalid.is_empty() || last && unfinished) {
            text.push(REPLACEMENT);
            taken += invalid.len();
        }
    }
    bytes.drain(..taken);
    text
}

/// Whether a token stands for one byte, in the form that the tokenizers crate decodes.
fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>'));
    digits.is_some_and(|d| d.len() == 2 && u8::from_str_radix(d, 16).is_ok())
}
