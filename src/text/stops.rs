//! Stop strings, over text that comes in pieces.

use super::TextError;

/// Looks for stop strings and shows the text before them.
///
/// The stop string that begins first in the whole text is found, however the text is cut into
/// pieces; of those that begin at one place the one listed first. Text is held back while it could
/// be the beginning of one.
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
    /// Text not shown: the beginning of a stop string, perhaps.
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

    /// Adds a stop string, behind those that were added before.
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

    /// Takes a piece of text and answers what can be shown. After a stop string that is nothing.
    pub fn push(&mut self, piece: &str) -> String {
        self.advance(piece, false)
    }

    /// What can be shown when no text follows.
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
