//! Decoding of several sequences together.

use std::{borrow::Borrow, iter::FusedIterator};

use super::{Cancel, FinishReason, GenerateError, Sampler, Sampling, choose};
use crate::{
    cache::{CacheBackend, TokenIds},
    model::{Decoder, Input},
};

/// As [`Generation`](super::Generation), for the sequences of a batch. Each item is one step: the id of every sequence,
/// or `None` for one that has ended. A sequence has the ids that it has alone.
///
/// The first call of `next` processes all prompts. The iterator ends when every sequence has, or after an error. Ended
/// sequences stay in the cache; [`select_sequences`](CacheBackend::select_sequences) leaves them out.
///
/// ```
/// use burn::tensor::Device;
/// use kv_direct::{
///     FullKv,
///     generate::{BatchGeneration, FinishReason},
///     model::{Decoder, DecoderConfig},
/// };
///
/// # let device = Device::flex();
/// # let decoder = Decoder::from_weights(DecoderConfig::new(97, 64, 3, 4, 2), &device, |_, shape| {
/// #     Ok::<_, std::convert::Infallible>(vec![0.01; shape.iter().product()])
/// # })?;
/// let cache = FullKv::new(&decoder.shape());
/// let prompts = [vec![3, 1, 4], vec![1, 5]];
/// let mut generation = BatchGeneration::new(&decoder, cache, &prompts)?.with_max_new(4);
/// let steps: Vec<Vec<Option<u32>>> = generation.by_ref().collect::<Result<_, _>>()?;
/// assert_eq!((steps.len(), steps[0].len()), (4, 2));
/// assert_eq!(generation.finish_reason(1), Some(FinishReason::Length));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct BatchGeneration<D, C> {
    decoder: D,
    cache: C,
    sequences: Vec<Sequence>,
    eos: Vec<u32>,
    cancel: Cancel,
    failed: bool,
}

#[derive(Debug)]
struct Sequence {
    /// Ids to process: the prompt, or the last id.
    due: Vec<u32>,
    /// Ids that may still be generated.
    left: usize,
    sampler: Sampler,
    logits: Vec<f32>,
    ended: Option<FinishReason>,
}

impl<D, C> BatchGeneration<D, C>
where
    D: Borrow<Decoder>,
    C: CacheBackend,
{
    /// Continues each sequence of `cache` with its prompt. A new cache takes as many sequences as there are prompts.
    /// Decoding is greedy, and the number of ids is not limited.
    ///
    /// # Errors
    /// [`EmptyPrompt`](GenerateError::EmptyPrompt) if there is no prompt, or an empty one.
    pub fn new(decoder: D, cache: C, prompts: &[Vec<u32>]) -> Result<Self, GenerateError> {
        if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
            return Err(GenerateError::EmptyPrompt);
        }
        let sequences = prompts.iter().map(|prompt| {
            let mut sampler = Sampler::new(Sampling::new());
            sampler.see(prompt);
            Sequence {
                due: prompt.clone(),
                left: usize::MAX,
                sampler,
                logits: Vec::new(),
                ended: None,
            }
        });
        Ok(Self {
            decoder,
            cache,
            sequences: sequences.collect(),
            eos: Vec::new(),
            cancel: Cancel::new(),
            failed: false,
        })
    }

    /// A sequence ends after any of these ids.
    #[must_use]
    pub fn with_eos(mut self, eos: &[u32]) -> Self {
        self.eos = eos.to_vec();
        self
    }

    /// A sequence ends after `count` ids. With 0, none is generated and the cache is not changed.
    #[must_use]
    pub fn with_max_new(mut self, count: usize) -> Self {
        for sequence in &mut self.sequences {
            sequence.left = count;
            sequence.ended = (count == 0).then_some(FinishReason::Length);
        }
        self
    }

    /// Draws the ids of each sequence by what `sampling` returns for its index. The ids of its prompt count as seen.
    #[must_use]
    pub fn with_sampling(mut self, sampling: impl Fn(usize) -> Sampling) -> Self {
        let sequences = self.sequences.into_iter().enumerate();
        let sampled = sequences.map(|(index, sequence)| Sequence {
            sampler: sequence.sampler.with_sampling(sampling(index)),
            ..sequence
        });
        self.sequences = sampled.collect();
        self
    }

    /// Ends all sequences as soon as `cancel` is on, which is looked at before every step.
    #[must_use]
    pub fn with_cancel(mut self, cancel: &Cancel) -> Self {
        self.cancel = cancel.clone();
        self
    }

    /// The logits that the last id of a sequence was chosen from; empty before the first id.
    ///
    /// # Panics
    /// If there is no such sequence.
    #[must_use]
    pub fn logits(&self, sequence: usize) -> &[f32] {
        &self.sequences[sequence].logits
    }

    /// Why a sequence ended; `None` while it runs and after an error.
    ///
    /// # Panics
    /// If there is no such sequence.
    #[must_use]
    pub fn finish_reason(&self, sequence: usize) -> Option<FinishReason> {
        self.sequences[sequence].ended.clone()
    }

    /// The cache. It has not processed the last id of a sequence.
    #[must_use]
    pub fn into_cache(self) -> C {
        self.cache
    }

    fn step(&mut self) -> Result<Vec<Option<u32>>, GenerateError> {
        let due = |sequence: &mut Sequence| match &sequence.ended {
            None => std::mem::take(&mut sequence.due),
            Some(_) => Vec::new(),
        };
        let tokens: Vec<Vec<u32>> = self.sequences.iter_mut().map(due).collect();
        let input = Input::from(TokenIds::from(tokens)).last_only();
        let logits = self.decoder.borrow().forward(input, &mut self.cache)?;
        let logits = logits.try_into_vec_as::<f32>().map_err(Box::new)?;
        let vocab = logits.len() / self.sequences.len();
        let sequences = self.sequences.iter_mut().zip(logits.chunks_exact(vocab));
        let ids = sequences.zip(self.cache.lengths());
        ids.map(|((sequence, logits), &position)| match sequence.ended {
            None => sequence.choose(logits, position, &self.eos).map(Some),
            Some(_) => Ok(None),
        })
        .collect()
    }
}

impl Sequence {
    fn choose(
        &mut self,
        logits: &[f32],
        position: usize,
        eos: &[u32],
    ) -> Result<u32, GenerateError> {
        self.logits = logits.to_vec();
        let id = choose(&mut self.sampler, logits, position)?;
        self.due = vec![id];
        self.left -= 1;
        if eos.contains(&id) {
            self.ended = Some(FinishReason::EndOfText(id));
        } else if self.left == 0 {
            self.ended = Some(FinishReason::Length);
        }
        Ok(id)
    }
}

impl<D, C> Iterator for BatchGeneration<D, C>
where
    D: Borrow<Decoder>,
    C: CacheBackend,
{
    type Item = Result<Vec<Option<u32>>, GenerateError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.cancel.is_cancelled() {
            for sequence in &mut self.sequences {
                sequence.ended.get_or_insert(FinishReason::Cancelled);
            }
        }
        if self.failed || self.sequences.iter().all(|s| s.ended.is_some()) {
            return None;
        }
        let next = self.step();
        self.failed = next.is_err();
        Some(next)
    }
}

impl<D, C> FusedIterator for BatchGeneration<D, C>
where
    D: Borrow<Decoder>,
    C: CacheBackend,
{
}
