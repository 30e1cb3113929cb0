//! Decoding over token ids: a prompt goes in, an iterator of ids comes out. No text, no printing.

use std::collections::VecDeque;

use burn::tensor::TensorReadError;

use crate::{
    cache::{CacheBackend, TokenIds},
    model::{Decoder, ForwardError, Input},
};

/// Why generation stopped with an error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// The prompt has no tokens.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The model's logits hold a NaN or an infinity, so no token can be chosen.
    #[error("the logits at position {position} are not finite")]
    NotFinite {
        /// Tokens taken in when they were computed.
        position: usize,
    },
    /// The logits could not be read from the device.
    #[error("the logits could not be read")]
    Read(#[from] Box<TensorReadError>),
    /// The decoder refused.
    #[error(transparent)]
    Forward(#[from] ForwardError),
}

/// Greedy decoding: the id with the largest logit, the lowest of equals.
///
/// An iterator that takes the prompt in when first asked, then one token a step, and ends after an
/// id that ends a text or after an error (a full context is one). With a
/// lossless cache the ids do not depend on which one it is or how the prompt is cut.
///
/// ```
/// use burn::tensor::Device;
/// use kv_direct::{cache::FullKv, generate::Greedy, model::{Decoder, DecoderConfig}};
///
/// # let device = Device::flex();
/// # let decoder = Decoder::from_weights(DecoderConfig::new(97, 64, 3, 4, 2), &device, |_, shape| {
/// #     Ok::<_, std::convert::Infallible>(vec![0.01; shape.iter().product()])
/// # })?;
/// let mut cache = FullKv::new(&decoder.shape());
/// let ids: Vec<u32> = Greedy::new(&decoder, &mut cache, &[3, 1, 4])?.take(5).collect::<Result<_, _>>()?;
/// assert_eq!(ids.len(), 5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Greedy<'a, C>
where
    C: CacheBackend + ?Sized,
{
    decoder: &'a Decoder,
    cache: &'a mut C,
    /// What is to be fed before the next id can be chosen: the prompt's chunks, then the last id.
    due: VecDeque<Vec<u32>>,
    eos: &'a [u32],
    done: bool,
}

impl<'a, C> Greedy<'a, C>
where
    C: CacheBackend + ?Sized,
{
    /// Goes on from where `cache` stands with the tokens of `prompt`.
    ///
    /// # Errors
    /// [`EmptyPrompt`](GenerateError::EmptyPrompt).
    pub fn new(
        decoder: &'a Decoder,
        cache: &'a mut C,
        prompt: &[u32],
    ) -> Result<Self, GenerateError> {
        if prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        let due = VecDeque::from([prompt.to_vec()]);
        Ok(Self {
            decoder,
            cache,
            due,
            eos: &[],
            done: false,
        })
    }

    /// Ends after any of these ids.
    #[must_use]
    pub const fn with_eos(mut self, eos: &'a [u32]) -> Self {
        self.eos = eos;
        self
    }

    /// Takes the prompt in by calls of at most `tokens` tokens, one at least.
    #[must_use]
    pub fn with_chunks(mut self, tokens: usize) -> Self {
        let prompt: Vec<u32> = self.due.drain(..).flatten().collect();
        self.due = prompt.chunks(tokens.max(1)).map(<[u32]>::to_vec).collect();
        self
    }

    fn step(&mut self) -> Result<u32, GenerateError> {
        loop {
            let tokens = self.due.pop_front().unwrap_or_default();
            let more = !self.due.is_empty();
            let input = Input::from(TokenIds::from(vec![tokens]))
                .last_only()
                .more_follows(more);
            let logits = self.decoder.forward(input, self.cache)?;
            if !more {
                let position = self.cache.position(0);
                let logits = logits.try_into_vec_as::<f32>().map_err(Box::new)?;
                let id = argmax(&logits).ok_or(GenerateError::NotFinite { position })?;
                self.due.push_back(vec![id]);
                return Ok(id);
            }
        }
    }
}

impl<C> Iterator for Greedy<'_, C>
where
    C: CacheBackend + ?Sized,
{
    type Item = Result<u32, GenerateError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let next = self.step();
        self.done = match &next {
            Ok(id) => self.eos.contains(id),
            Err(_) => true,
        };
        Some(next)
    }
}

/// The index of the largest logit, the lowest of equals; `None` if one is not finite or there is none.
///
/// ```
/// use kv_direct::generate::argmax;
///
/// assert_eq!(argmax(&[0.5, 2.0, 2.0]), Some(1));
/// assert_eq!(argmax(&[0.5, f32::NAN]), None);
/// ```
#[must_use]
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best = 0;
    for (index, logit) in logits.iter().enumerate() {
        if !logit.is_finite() {
            return None;
        }
        if *logit > logits[best] {
            best = index;
        }
    }
    u32::try_from(best).ok().filter(|_| !logits.is_empty())
}
