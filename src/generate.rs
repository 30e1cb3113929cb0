//! Decoding over token ids: from a prompt to an iterator over generated ids. Works without text and prints nothing.

mod batch;
mod cancel;
mod sampling;

use std::{borrow::Borrow, collections::VecDeque, iter::FusedIterator};

use burn::tensor::TensorReadError;

pub use self::{
    batch::BatchGeneration,
    cancel::Cancel,
    sampling::{Sampler, Sampling, SamplingError},
};
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
        /// Tokens that were processed when they were computed.
        position: usize,
    },
    /// Every id is banned.
    #[error("all ids are banned, and one has to be chosen after position {position}")]
    AllBanned {
        /// Tokens before the id.
        position: usize,
    },
    /// The logits could not be read from the device.
    #[error("the logits could not be read")]
    Read(#[from] Box<TensorReadError>),
    /// The decoder refused a step, or failed in it.
    #[error(transparent)]
    Forward(#[from] ForwardError),
}

/// Why a generation ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// This id was generated, which ends a text.
    EndOfText(u32),
    /// The text contains this stop string.
    StopString(String),
    /// The requested number of tokens was generated.
    Length,
    /// [`Cancel::cancel`] was called.
    Cancelled,
}

/// An iterator over generated ids. An id is that of the largest logit (the lowest of equals), or drawn by a
/// [`Sampling`].
///
/// The first call of `next` processes the prompt, every later one a single token. The iterator ends after an id that
/// ends a text (which it still yields), after the requested number of ids, or after an error. A full context is an
/// error. The cache has not processed the last id. With a lossless cache, the ids depend neither on the backend nor
/// on the chunks of the prompt.
///
/// The decoder is a `&Decoder`, an `Arc<Decoder>` or a `Decoder`. The cache is owned or a `&mut`.
///
/// ```
/// use burn::tensor::Device;
/// use kv_direct::{
///     FullKv,
///     generate::{FinishReason, Generation},
///     model::{Decoder, DecoderConfig},
/// };
///
/// # let device = Device::flex();
/// # let decoder = Decoder::from_weights(DecoderConfig::new(97, 64, 3, 4, 2), &device, |_, shape| {
/// #     Ok::<_, std::convert::Infallible>(vec![0.01; shape.iter().product()])
/// # })?;
/// let mut cache = FullKv::new(&decoder.shape());
/// let mut generation = Generation::new(&decoder, &mut cache, &[3, 1, 4])?.with_max_new(5);
/// let ids: Vec<u32> = generation.by_ref().collect::<Result<_, _>>()?;
/// assert_eq!(ids.len(), 5);
/// assert_eq!(generation.finish_reason(), Some(FinishReason::Length));
///
/// // One that owns what it needs can go to another thread.
/// let decoder = std::sync::Arc::new(decoder);
/// let owned = Generation::new(decoder.clone(), FullKv::new(&decoder.shape()), &[3, 1, 4])?;
/// let found: Vec<u32> = std::thread::spawn(|| owned.take(5).map(Result::unwrap).collect()).join().unwrap();
/// assert_eq!(found, ids);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Generation<D, C> {
    decoder: D,
    cache: C,
    /// Tokens to process before the next id can be chosen: the chunks of the prompt, then the last id.
    due: VecDeque<Vec<u32>>,
    eos: Vec<u32>,
    /// Ids that may still be generated.
    left: usize,
    sampler: Sampler,
    cancel: Cancel,
    /// Those that the last id was chosen from.
    logits: Vec<f32>,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    EndOfText(u32),
    Cancelled,
    Failed,
}

impl<D, C> Generation<D, C>
where
    D: Borrow<Decoder>,
    C: CacheBackend,
{
    /// Continues from the present content of `cache` with the tokens of `prompt`. Decoding is greedy, and the number
    /// of ids is not limited.
    ///
    /// # Errors
    /// [`EmptyPrompt`](GenerateError::EmptyPrompt).
    pub fn new(decoder: D, cache: C, prompt: &[u32]) -> Result<Self, GenerateError> {
        if prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        let mut sampler = Sampler::new(Sampling::new());
        sampler.see(prompt);
        Ok(Self {
            decoder,
            cache,
            due: VecDeque::from([prompt.to_vec()]),
            eos: Vec::new(),
            left: usize::MAX,
            sampler,
            cancel: Cancel::new(),
            logits: Vec::new(),
            state: State::Running,
        })
    }

    /// Ends after any of these ids.
    #[must_use]
    pub fn with_eos(mut self, eos: &[u32]) -> Self {
        self.eos = eos.to_vec();
        self
    }

    /// Processes the prompt in steps of at most `tokens` tokens; 0 counts as 1.
    #[must_use]
    pub fn with_chunks(mut self, tokens: usize) -> Self {
        let prompt: Vec<u32> = self.due.drain(..).flatten().collect();
        self.due = prompt.chunks(tokens.max(1)).map(<[u32]>::to_vec).collect();
        self
    }

    /// Ends as soon as `cancel` is on, which is looked at before every step. A prompt [in chunks](Self::with_chunks) is
    /// left between two of them. The cache has then processed whole chunks, and can be continued or truncated.
    #[must_use]
    pub fn with_cancel(mut self, cancel: &Cancel) -> Self {
        self.cancel = cancel.clone();
        self
    }

    /// Ends after `count` ids. With 0, none is generated and the cache is not changed.
    #[must_use]
    pub const fn with_max_new(mut self, count: usize) -> Self {
        self.left = count;
        self
    }

    /// Draws ids by `sampling`. The ids of the prompt count as seen.
    #[must_use]
    pub fn with_sampling(mut self, sampling: Sampling) -> Self {
        self.sampler = self.sampler.with_sampling(sampling);
        self
    }

    /// Counts `ids` as seen, too: those that the cache processed before the prompt.
    #[must_use]
    pub fn with_history(mut self, ids: &[u32]) -> Self {
        self.sampler.see(ids);
        self
    }

    /// The logits that the last id was chosen from, before bans and penalties; empty before the first id.
    #[must_use]
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// The cache. It has not processed the last id.
    #[must_use]
    pub const fn cache(&self) -> &C {
        &self.cache
    }

    /// The cache, to go on with it.
    #[must_use]
    pub fn into_cache(self) -> C {
        self.cache
    }

    /// Why the generation ended; `None` while it runs and after an error.
    #[must_use]
    pub const fn finish_reason(&self) -> Option<FinishReason> {
        match self.state {
            State::EndOfText(id) => Some(FinishReason::EndOfText(id)),
            State::Cancelled => Some(FinishReason::Cancelled),
            State::Running if self.left == 0 => Some(FinishReason::Length),
            State::Running | State::Failed => None,
        }
    }

    /// The next id; `None` if it was cancelled.
    fn step(&mut self) -> Result<Option<u32>, GenerateError> {
        loop {
            if self.cancel.is_cancelled() {
                return Ok(None);
            }
            let tokens = self.due.pop_front().unwrap_or_default();
            let more = !self.due.is_empty();
            let input = Input::from(TokenIds::from(vec![tokens]))
                .last_only()
                .more_follows(more);
            let logits = self.decoder.borrow().forward(input, &mut self.cache)?;
            if !more {
                let position = self.cache.lengths().first().copied().unwrap_or(0);
                self.logits = logits.try_into_vec_as::<f32>().map_err(Box::new)?;
                let id = choose(&mut self.sampler, &self.logits, position)?;
                self.due.push_back(vec![id]);
                return Ok(Some(id));
            }
        }
    }
}

impl<D, C> Iterator for Generation<D, C>
where
    D: Borrow<Decoder>,
    C: CacheBackend,
{
    type Item = Result<u32, GenerateError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 || self.state != State::Running {
            return None;
        }
        let Some(next) = self.step().transpose() else {
            self.state = State::Cancelled;
            return None;
        };
        self.left -= 1;
        match &next {
            Ok(id) if self.eos.contains(id) => self.state = State::EndOfText(*id),
            Ok(_) => {}
            Err(_) => self.state = State::Failed,
        }
        Some(next)
    }
}

impl<D, C> FusedIterator for Generation<D, C>
where
    D: Borrow<Decoder>,
    C: CacheBackend,
{
}

/// The id that a sampler chooses after `position` tokens.
fn choose(sampler: &mut Sampler, logits: &[f32], position: usize) -> Result<u32, GenerateError> {
    if logits.iter().any(|logit| !logit.is_finite()) {
        return Err(GenerateError::NotFinite { position });
    }
    let id = sampler.choose(logits);
    id.ok_or(GenerateError::AllBanned { position })
}

/// The index of the largest logit, the lowest of equals. A logit of negative infinity is a ban and never chosen. `None`
/// if a logit is NaN or infinity, or if there is none to choose from.
///
/// ```
/// use kv_direct::generate::argmax;
///
/// assert_eq!(argmax(&[0.5, 2.0, 2.0]), Some(1));
/// assert_eq!(argmax(&[f32::NEG_INFINITY, -7.0]), Some(1));
/// assert_eq!(argmax(&[0.5, f32::NAN]), None);
/// ```
#[must_use]
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best = None;
    let mut largest = f32::NEG_INFINITY;
    for (index, &logit) in logits.iter().enumerate() {
        if logit.is_nan() || logit == f32::INFINITY {
            return None;
        }
        if logit > largest {
            (best, largest) = (Some(index), logit);
        }
    }
    best.and_then(|best| u32::try_from(best).ok())
}
