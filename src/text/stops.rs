//! Stop strings in streamed text.

use super::TextError;

/// Searches streamed text for stop strings and returns the text before them.
///
/// The stop string that begins first in the whole text is found, however the text is cut into pieces. Of several that
/// begin at the same place, it is the one that was added first. Text is held back while it could be the beginning of
/// a stop string.
///
/// ```
/// use kv_direct::text::Stops;
///
/// let mut stops = Stops::new();
/// stops.add("END")?;
/// assert_eq!(stops.push("to the E"), "to the ");
/// assert_eq!(stops.push("ND of it"), "");
/// assert_eq!(stops.found(), Some("END"));
/// # Ok::<(), kv_direct::text::TextError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Stops {
    stops: Vec<String>,
    /// Text that was not returned yet, because it could be the beginning of a stop string.
    held: String,
    found: Option<usize>,
}

impl Stops {
    /// No stop strings.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            stops: Vec::new(),
            held: String::new(),
            found: None,
        }
    }

    /// Adds a stop string after those that were added before.
    ///
    /// # Errors
    /// [`TextError::EmptyStop`].
    pub fn add(&mut self, stop: impl Into<String>) -> Result<(), TextError> {
        let stop = stop.into();
        if stop.is_empty() {
            return Err(TextError::EmptyStop);
        }
        self.stops.push(stop);
        Ok(())
    }

    /// Appends a piece of text and returns the text that is certainly before a stop string. After a stop string that
    /// is empty.
    pub fn push(&mut self, piece: &str) -> String {
        self.advance(piece, false)
    }

    /// Ends the text and returns what was held back.
    pub fn finish(&mut self) -> String {
        self.advance("", true)
    }

    /// The stop string that was found.
    #[must_use]
    pub fn found(&self) -> Option<&str> {
        self.found.map(|index| &*self.stops[index])
    }

    fn advance(&mut self, piece: &str, last: bool) -> String {
        if self.found.is_some() {
            return String::new();
        }
        self.held.push_str(piece);
        for (at, _) in self.held.char_indices() {
            let rest = &self.held[at..];
            for (index, stop) in self.stops.iter().enumerate() {
                let found = rest.starts_with(stop);
                if found {
                    self.found = Some(index);
                }
                if found || !last && stop.starts_with(rest) {
                    let rest = self.held.split_off(at);
                    let shown = std::mem::replace(&mut self.held, rest);
                    return shown;
                }
            }
        }
        std::mem::take(&mut self.held)
    }
}
