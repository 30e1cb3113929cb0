//! Streamed text of a generation.

use std::{borrow::Borrow, iter::FusedIterator};

use super::{Stops, TextError, TextStream, Tokenizer};
use crate::{
    cache::CacheBackend,
    generate::{FinishReason, Generation},
    model::Decoder,
};

/// An iterator over pieces of the text of a [`Generation`], up to a stop string.
///
/// Pieces are never empty. The id that ends a text adds no piece. When a stop string ends the text, the cache has
/// processed the ids up to there, and perhaps a few more.
///
/// ```
/// use burn::tensor::Device;
/// use kv_direct::{
///     FullKv,
///     generate::{FinishReason, Generation},
///     pretrained::load,
///     text::{TextGeneration, Tokenizer},
/// };
///
/// let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/tiny");
/// let (tokenizer, model) = (Tokenizer::from_dir(dir)?, load(dir, &Device::flex())?);
/// let mut cache = FullKv::new(&model.decoder.shape());
/// let ids = Generation::new(&model.decoder, &mut cache, &[1, 2, 3])?.with_max_new(4);
///
/// let mut text = TextGeneration::new(ids, &tokenizer);
/// let shown: String = text.by_ref().collect::<Result<_, _>>()?;
/// assert_eq!(text.finish_reason(), Some(FinishReason::Length));
/// assert_eq!(shown, tokenizer.decode(text.ids())?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TextGeneration<'a, D, C> {
    generation: Generation<D, C>,
    stream: TextStream<'a>,
    stops: Stops,
    tokenizer: &'a Tokenizer,
    /// Special tokens that end the text, as they were asked for.
    stop_tokens: Vec<(u32, String)>,
    ids: Vec<u32>,
    done: bool,
    finish_reason: Option<FinishReason>,
    /// The error of the generation. It is returned after the text that was held back.
    failed: Option<TextError>,
}

impl<'a, D, C> TextGeneration<'a, D, C>
where
    D: Borrow<Decoder>,
    C: CacheBackend,
{
    /// The text of `generation`, decoded by `tokenizer`.
    #[must_use]
    pub const fn new(generation: Generation<D, C>, tokenizer: &'a Tokenizer) -> Self {
        Self {
            generation,
            stream: tokenizer.stream(),
            stops: Stops::new(),
            tokenizer,
            stop_tokens: Vec::new(),
            ids: Vec::new(),
            done: false,
            finish_reason: None,
            failed: None,
        }
    }

    /// Adds a stop string, before which the text ends; see [`Stops`]. The string of a special token, which has no text,
    /// stands for the token.
    ///
    /// # Errors
    /// [`TextError::EmptyStop`], and [`TextError::SpecialStop`] for a special token beside other text.
    pub fn with_stop(mut self, stop: impl Into<String>) -> Result<Self, TextError> {
        let stop = stop.into();
        match self.tokenizer.inner.special_in(&stop) {
            Some((id, token)) if token == stop => self.stop_tokens.push((id, stop)),
            Some((_, token)) => return Err(TextError::SpecialStop { stop, token }),
            None => self.stops.add(stop)?,
        }
        Ok(self)
    }

    /// The ids generated so far, including those without text.
    #[must_use]
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Why the text ended; `None` while the generation runs and after an error.
    #[must_use]
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finish_reason.clone()
    }

    /// The text of the next id, or the text that was held back.
    fn step(&mut self) -> Result<String, TextError> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        let id = match self.generation.next().transpose() {
            Ok(id) => id,
            Err(error) => {
                self.failed = Some(error.into());
                let rest = self.stops.push(&self.stream.finish()?);
                return Ok(rest + &self.stops.finish());
            }
        };
        self.ids.extend(id);
        let special = self.stop_tokens.iter().find(|(stop, _)| Some(*stop) == id);
        let special = special.map(|(_, stop)| FinishReason::StopString(stop.clone()));
        let ended = special.or_else(|| self.generation.finish_reason());
        let mut shown = String::new();
        if let Some(id) = id
            && !matches!(ended, Some(FinishReason::EndOfText(_)))
        {
            shown += &self.stops.push(&self.stream.push(id)?);
        }
        if ended.is_some() {
            shown += &self.stops.push(&self.stream.finish()?);
            shown += &self.stops.finish();
        }
        let stopped = self.stops.found();
        let stopped = stopped.map(|stop| FinishReason::StopString(stop.to_owned()));
        self.finish_reason = stopped.or(ended);
        // Without a reason and without an id, the generation has failed before.
        self.done = self.finish_reason.is_some() || id.is_none();
        Ok(shown)
    }
}

impl<D, C> Iterator for TextGeneration<'_, D, C>
where
    D: Borrow<Decoder>,
    C: CacheBackend,
{
    type Item = Result<String, TextError>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.done {
            match self.step() {
                Ok(piece) if piece.is_empty() => {}
                Ok(piece) => return Some(Ok(piece)),
                Err(error) => {
                    self.done = true;
                    return Some(Err(error));
                }
            }
        }
        None
    }
}

impl<D, C> FusedIterator for TextGeneration<'_, D, C>
where
    D: Borrow<Decoder>,
    C: CacheBackend,
{
}
