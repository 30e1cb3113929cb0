//! The tokenizer of the tokenizers crate. Its panics are errors.

use std::{error::Error, fmt, panic};

use tokenizers::{Decoder, DecoderWrapper, Encoding, Tokenizer};

type Source = Box<dyn Error + Send + Sync>;

/// A tokenizer, and what it does with bytes.
pub(super) struct Vocabulary {
    inner: Tokenizer,
    bytes: Bytes,
    /// Whether it splits text by regular expressions.
    splits: bool,
}

/// How tokens stand for bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bytes {
    /// Every character of a token is a byte, and nothing else is done to them.
    Alone,
    /// Every character of a token is a byte, and further steps follow.
    Among,
    /// Otherwise.
    Otherwise,
}

/// The most white space in a row that is split. From a million on, the regular expressions of the tokenizers crate give
/// up without a word.
const LONGEST_SPACE: usize = 500_000;

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary")
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// Reads a `tokenizer.json`. Truncation and padding are switched off.
    pub(super) fn from_bytes(bytes: Vec<u8>) -> Result<Self, Source> {
        let inner = caught(|| {
            let mut inner = Tokenizer::from_bytes(bytes)?;
            inner.with_padding(None).with_truncation(None)?;
            // What is wrong with a post-processor shows when it is used.
            inner.encode_fast("", true)?;
            Ok(inner)
        })?;
        let written = |part: serde_json::Result<String>| part.unwrap_or_default();
        let decoder = written(serde_json::to_string(&inner.get_decoder()));
        let splitter = written(serde_json::to_string(&inner.get_pre_tokenizer()));
        let bytes = match inner.get_decoder() {
            Some(DecoderWrapper::ByteLevel(_)) => Bytes::Alone,
            _ if decoder.contains("\"ByteLevel\"") => Bytes::Among,
            _ => Bytes::Otherwise,
        };
        let splits = splitter.contains("\"Regex\"") || splitter.contains("\"use_regex\":true");
        Ok(Self {
            inner,
            bytes,
            splits,
        })
    }

    /// The ids of a text, with the special tokens around it if asked for.
    pub(super) fn encode(&self, text: &str, special: bool) -> Result<Encoding, Source> {
        if self.splits {
            let longest = text.split(|c: char| !c.is_whitespace());
            let longest = longest.map(str::len).max().unwrap_or(0);
            if longest > LONGEST_SPACE {
                let message = format!(
                    "{longest} bytes of white space in a row, at most {LONGEST_SPACE} can be split"
                );
                return Err(message.into());
            }
        }
        caught(|| self.inner.encode_fast(text, special))
    }

    /// The text of ids that are [`shown`](Self::shown).
    pub(super) fn decode(&self, ids: &[u32]) -> Result<String, Source> {
        match self.bytes {
            Bytes::Alone => {
                let bytes = ids.iter().flat_map(|&id| self.token_bytes(id));
                let bytes: Vec<u8> = bytes.flatten().collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Bytes::Among => {
                let tokens = ids.iter().filter_map(|&id| self.byte_characters(id));
                let tokens: Vec<String> = tokens.collect();
                caught(|| match self.inner.get_decoder() {
                    Some(decoder) => decoder.decode(tokens),
                    None => Ok(tokens.concat()),
                })
            }
            Bytes::Otherwise => caught(|| self.inner.decode(ids, true)),
        }
    }

    pub(super) fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The token of an id; `None` for special and unknown ones, which decoding leaves out.
    pub(super) fn shown(&self, id: u32) -> Option<String> {
        let added = self.inner.get_added_vocabulary();
        let token = self.inner.id_to_token(id)?;
        (!added.is_special_token(&token)).then_some(token)
    }

    /// The special token that a text contains: the longest at the first place.
    pub(super) fn special_in(&self, text: &str) -> Option<(u32, String)> {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        let special = added.iter();
        let special = special.filter(|(_, token)| token.special && !token.content.is_empty());
        let found = special.filter_map(|(&id, token)| {
            let at = text.find(&token.content)?;
            Some((at, usize::MAX - token.content.len(), id, &token.content))
        });
        let (_, _, id, token) = found.min()?;
        Some((id, token.clone()))
    }

    /// The bytes of a token, if tokens are nothing but bytes. An added token stands for its text.
    pub(super) fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        if self.bytes != Bytes::Alone {
            return None;
        }
        let token = self.shown(id)?;
        let bytes = token.chars().map(byte).collect::<Option<Vec<u8>>>();
        match bytes {
            Some(bytes) if !self.is_added(id) => Some(bytes),
            _ => Some(token.into_bytes()),
        }
    }

    /// A token with a character for each byte.
    fn byte_characters(&self, id: u32) -> Option<String> {
        let token = self.shown(id)?;
        match self.is_added(id) {
            true => Some(token.bytes().map(character).collect()),
            false => Some(token),
        }
    }

    fn is_added(&self, id: u32) -> bool {
        let added = self.inner.get_added_vocabulary();
        added.get_added_tokens_decoder().contains_key(&id)
    }
}

/// The character of a byte in byte-level tokens: itself if it is printable in Latin-1. The others have the characters
/// from U+0100 on, in their order.
fn character(byte: u8) -> char {
    let others = match byte {
        0..=0x20 => u32::from(byte),
        0x7F..=0xA0 => 33 + u32::from(byte - 0x7F),
        0xAD => 67,
        _ => return char::from(byte),
    };
    char::from_u32(0x100 + others).unwrap_or_default()
}

/// The byte of a character.
fn byte(c: char) -> Option<u8> {
    let byte = match u32::from(c) {
        code @ 0..0x100 => code,
        code @ 0x100..=0x120 => code - 0x100,
        code @ 0x121..=0x142 => code - 0x121 + 0x7F,
        0x143 => 0xAD,
        _ => return None,
    };
    let byte = u8::try_from(byte).ok()?;
    (character(byte) == c).then_some(byte)
}

/// The result of `work`, an error if it panics.
fn caught<T>(work: impl FnOnce() -> Result<T, Source>) -> Result<T, Source> {
    let panicked = |_| Err("the tokenizers crate panicked".into());
    panic::catch_unwind(panic::AssertUnwindSafe(work)).unwrap_or_else(panicked)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn bytes_and_characters_are_pairs() {
        let characters: BTreeSet<char> = (0..=u8::MAX).map(character).collect();
        assert_eq!(characters.len(), 256);
        for c in '\0'..'\u{1000}' {
            assert_eq!(byte(c).map(character), characters.get(&c).copied(), "{c:?}");
        }
        assert_eq!((character(b' '), character(b'\n')), ('\u{120}', '\u{10A}'));
    }
}
