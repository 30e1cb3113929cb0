//! The contract between a decoder and its KV cache.
//!
//! Read this file first. A decoder runs a step through its layers. At each layer attention hands the new keys and
//! values to the cache, and receives everything it may read there. A backend decides what is stored.
//!
//! # Terms
//! * A **sequence** is one text of a batch. Sequences may differ in length, and in how many tokens they bring. There
//!   are no pads: in tensors of a step the tokens of all sequences stand one after another.
//! * A **position** is the index of a token in its own sequence, counted from 0.
//! * An **entry** is the key and the value of one token in one layer. It is stored in a **slot** of the layer's
//!   buffers. Slots may be free, and need not be in the order of positions.
//! * A **step** is one forward call of the decoder. It brings any number of new tokens for every sequence.
//! * A **full-attention layer** attends to all earlier tokens, a **sliding-window layer** to the newest
//!   `window` tokens, the query's own included.
//! * A lossy backend **evicts** entries beyond its **token budget**: they are gone. A lossless backend only **drops**
//!   what it can rebuild, by a **replay** of old tokens through the decoder.
//! * A **draft** is a run of tokens that may still be rejected. A **prompt** ends with the first step after which no
//!   more chunks of it follow.
//!
//! # A step
//! ```text
//! begin(step)                       validates the step; if it fails, nothing has changed
//! for every layer, in order:
//!     wants(layer)                  what attention has to report at this layer
//!     keys_values(layer, span)      stores the new entries, returns everything attention may read
//!     observe(layer, observed)      after attention, only where `wants` asked for something
//! commit()                          ends the step; entries beyond the token budget are evicted
//! ```
//!
//! Read on with [`Replay`] for a decoder of your own, [`policy`](crate::policy) for an eviction policy (most are forty
//! lines there), [`storage`](crate::storage) for a backend of your own, [`residual`](crate::residual) and
//! [`planner`](crate::planner) for exact results in less memory.

mod block_shape;
mod cached;
mod checked;
mod draft;
mod error;
mod forward;
mod joined;
mod keys_values;
mod layer;
mod observe;
mod replay;
mod resume;
mod scratch;
mod shape;
mod span;
mod state;
mod step;
mod tokens;

use std::{fmt, ops::ControlFlow};

pub use self::{
    block_shape::{BlockShape, ReplayCall},
    cached::CachedPositions,
    draft::Draft,
    error::CacheError,
    keys_values::KeysValues,
    layer::LayerIndex,
    observe::{Observation, Observed},
    replay::Replay,
    resume::{ReplayAt, ResumeProgress},
    shape::ModelShape,
    span::{Projection, Span},
    state::{State, StateValue},
    step::Step,
    tokens::TokenIds,
};
pub(crate) use self::{
    checked::{CheckedReplay, check},
    forward::forward_to_field,
    state::wrong,
};
use crate::memory::MemoryReport;

/// A KV cache: decides which keys and values attention reads.
///
/// The trait is object-safe. Nine methods are required. The others are provided: `wants` asks for nothing, `observe`
/// refuses every report, `reach` returns the lengths, `resume` does nothing, `join` goes through states, and the rest
/// return [`Unsupported`](CacheError::Unsupported).
///
/// # What the caller guarantees
/// * Calls follow the order of [a step](self#a-step). Every layer is called once.
/// * Steps follow one another without gap or overlap; each sequence starts at position 0. The number of
///   sequences is fixed by the first step, until [`select_sequences`](Self::select_sequences) or
///   [`clear`](Self::clear).
/// * Keys arrive after QK-norm and rotation at their own positions. The residual is the hidden state that enters the
///   layer's block, before its first norm.
/// * Keys and values are finite. Attention also sums over slots that a query cannot see, with weight 0, and
///   0 · ∞ is not 0.
/// * The [`KeysValues`] of a call is dropped before the next call.
///
/// # What an implementation guarantees
/// * The returned entries include those of the step, in every layer.
/// * A position identifies a token, never a place in storage. Positions are the original ones.
/// * Entries are evicted after attention, never before. The token budget holds once the step is committed; for the
///   tokens of a draft, once the draft is accepted.
/// * `begin` validates everything. A call that is refused there, or outside a step, changes nothing.
/// * A layer that fails has failed the step. While a step is open, and after it has failed until `clear` or
///   `set_state`, every other call that could change the cache returns [`Poisoned`](CacheError::Poisoned).
/// * A sliding-window layer keeps all entries that the next query sees, and those it would see if the last
///   step were undone.
/// * A sequence's result never depends on the other sequences.
/// * [`memory`](Self::memory) counts every byte that grows with the context.
///
/// # Shapes
/// As in [`Projection`] and [`KeysValues`].
///
/// # Errors
/// [`CacheError`]. A backend of another crate puts its own errors into [`CacheError::Backend`].
///
/// # Example
/// [`forward_backend!`](crate::forward_backend) has a backend that counts steps. `examples/custom_backend.rs` is a
/// complete one, `examples/knorm.rs` a policy.
pub trait CacheBackend: fmt::Debug + Send {
    /// Starts a step, or refuses it.
    ///
    /// # Errors
    /// [`Gap`](CacheError::Gap), [`Sequences`](CacheError::Sequences), [`Poisoned`](CacheError::Poisoned), and
    /// [`StepBytes`](CacheError::StepBytes) with a byte budget.
    fn begin(&mut self, step: &Step) -> Result<(), CacheError>;

    /// Stores the entries of `span` at `layer` and returns everything attention may read there.
    ///
    /// # Errors
    /// [`LayerOrder`](CacheError::LayerOrder), [`SpanPositions`](CacheError::SpanPositions),
    /// [`Shape`](CacheError::Shape), [`Dtype`](CacheError::Dtype), [`Poisoned`](CacheError::Poisoned),
    /// [`NotObserved`](CacheError::NotObserved) for the layer before, and the errors of a replay. The step has
    /// then failed.
    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError>;

    /// What attention has to report at `layer` in the open step. A decoder that cannot report it must fail the step.
    fn wants(&self, layer: LayerIndex) -> Observation {
        let _ = layer;
        Observation::Nothing
    }

    /// Receives what [`wants`](Self::wants) asked for, once per layer, after its attention.
    ///
    /// # Errors
    /// [`Observation`](CacheError::Observation) for a report of another kind, a second one, or one that was not asked
    /// for; [`Shape`](CacheError::Shape). The decoder must then fail the step.
    fn observe(&mut self, layer: LayerIndex, observed: Observed) -> Result<(), CacheError> {
        Err(CacheError::Observation {
            layer: layer.index(),
            expected: Observation::Nothing,
            found: observed.kind(),
        })
    }

    /// Ends the step. Entries beyond the token budget are evicted.
    ///
    /// # Errors
    /// [`Uncommittable`](CacheError::Uncommittable) if a layer was not called,
    /// [`NotObserved`](CacheError::NotObserved) if one was not observed.
    fn commit(&mut self) -> Result<(), CacheError>;

    /// Processed tokens of every sequence; empty before the first step. Not the number of entries held.
    fn lengths(&self) -> &[usize];

    /// How many positions lie before the next token of every sequence, as its attention counts them. By default the
    /// [`lengths`](Self::lengths). A backend that re-indexes entries returns the number it holds, so that a text may
    /// be longer than the decoder's context. The open step, if any, does not count.
    fn reach(&self) -> Vec<usize> {
        self.lengths().to_vec()
    }

    /// The positions that a next query could read at `layer`; no sequences if there is no such layer.
    fn cached(&self, layer: LayerIndex) -> CachedPositions;

    /// Bytes held, by part.
    fn memory(&self) -> MemoryReport;

    /// Shortens every sequence to its length in `to`, in all layers or in none. If all become 0, this is
    /// [`clear`](Self::clear). A lossless backend can always undo the last step. A sequence that keeps its length is
    /// not touched.
    ///
    /// # Errors
    /// [`Sequences`](CacheError::Sequences) for another number of sequences,
    /// [`TruncateBeyond`](CacheError::TruncateBeyond) for a length beyond the end,
    /// [`Irreversible`](CacheError::Irreversible) if entries before that length were evicted, or if an open draft began
    /// after it,
    /// [`Poisoned`](CacheError::Poisoned) while a step is open.
    ///
    /// # Cost
    /// If nothing was evicted, proportional to the tokens removed.
    fn truncate(&mut self, to: &[usize]) -> Result<(), CacheError>;

    /// Opens a draft. Until [`end_draft`](Self::end_draft) nothing is evicted, and truncation reaches back to
    /// this point at most; truncation to nothing ends the draft.
    ///
    /// # Errors
    /// [`DraftOpen`](CacheError::DraftOpen), [`Poisoned`](CacheError::Poisoned),
    /// [`Unsupported`](CacheError::Unsupported).
    ///
    /// # Cost
    /// For a policy that reads attention, `heads` f32 for every slot, layer and token of the draft.
    fn begin_draft(&mut self) -> Result<(), CacheError> {
        Err(unsupported("begin a draft"))
    }

    /// Ends the draft: accepts the tokens that were not truncated, or discards all of them.
    ///
    /// After `Accept`, entries are evicted as if the accepted tokens had come in one step. A prompt that ended within
    /// the draft has the length it had then. Scores may differ from those of one step in the last bit, because they are
    /// summed query by query. After `Discard`, the cache continues as if the draft had never been.
    ///
    /// # Errors
    /// [`NoDraft`](CacheError::NoDraft), [`Poisoned`](CacheError::Poisoned), [`Unsupported`](CacheError::Unsupported).
    fn end_draft(&mut self, draft: Draft) -> Result<(), CacheError> {
        let _ = draft;
        Err(unsupported("end a draft"))
    }

    /// Changes the batch to these of its sequences, in this order. One may be left out or repeated. None at
    /// all is [`clear`](Self::clear).
    ///
    /// # Errors
    /// [`NoSequence`](CacheError::NoSequence), [`DraftOpen`](CacheError::DraftOpen),
    /// [`Poisoned`](CacheError::Poisoned), [`Unsupported`](CacheError::Unsupported), and
    /// [`StepBytes`](CacheError::StepBytes) with a byte budget.
    fn select_sequences(&mut self, sequences: &[usize]) -> Result<(), CacheError> {
        let _ = sequences;
        Err(unsupported("select sequences"))
    }

    /// Frees everything that a next step can rebuild. That step rebuilds it, with the same bits.
    ///
    /// # Errors
    /// [`Poisoned`](CacheError::Poisoned), [`Unsupported`](CacheError::Unsupported) for a backend that rebuilds
    /// nothing.
    fn park(&mut self) -> Result<(), CacheError> {
        Err(unsupported("be parked: it rebuilds nothing"))
    }

    /// Rebuilds what [`park`](Self::park) dropped, so that the next step need not. `at` returns the decoder at a layer.
    /// `progress` is called before every layer and after the last; if it breaks, the cache is parked as before. A cache
    /// that is not parked is left as it is.
    ///
    /// # Errors
    /// [`Poisoned`](CacheError::Poisoned), [`StepBytes`](CacheError::StepBytes) with a byte budget, and those of the
    /// replay.
    ///
    /// ```
    /// # #[cfg(feature = "model")]
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::ops::ControlFlow;
    ///
    /// use kv_direct::{CacheBackend, residual::{Plan, ResidualCheckpoint}};
    /// # use kv_direct::{burn::tensor::Device, model::{Decoder, DecoderConfig}};
    /// # let decoder = Decoder::from_weights(DecoderConfig::new(97, 64, 3, 4, 2), &Device::flex(), |_, shape| {
    /// #     Ok::<_, std::convert::Infallible>(vec![0.01; shape.iter().product()])
    /// # })?;
    ///
    /// let plan = Plan::tokens(&decoder.shape()).with_hot(usize::MAX);
    /// let mut chat: Box<dyn CacheBackend> =
    ///     Box::new(ResidualCheckpoint::new(&decoder.shape(), decoder.conformance(), plan)?);
    /// decoder.forward(&[3, 1, 4][..], &mut chat)?;
    /// chat.park()?;
    /// let resumed = chat.resume(&|layer| Box::new(decoder.at(layer)), &mut |_| ControlFlow::Continue(()))?;
    /// assert!(resumed.is_continue() && chat.memory().keys_values > 0);
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "model"))]
    /// # fn main() {}
    /// ```
    fn resume(
        &mut self,
        at: &ReplayAt<'_>,
        progress: &mut (dyn FnMut(ResumeProgress) -> ControlFlow<()> + Send),
    ) -> Result<ControlFlow<()>, CacheError> {
        let _ = (at, progress);
        Ok(ControlFlow::Continue(()))
    }

    /// Everything a cache with the same options needs to continue from here. Keys, values and residuals are copied.
    ///
    /// # Errors
    /// [`DraftOpen`](CacheError::DraftOpen), [`Poisoned`](CacheError::Poisoned),
    /// [`Unsupported`](CacheError::Unsupported).
    fn state(&self) -> Result<State, CacheError> {
        Err(unsupported("return its state"))
    }

    /// Continues from `state`, whatever happened to this cache before. A refused state changes nothing.
    ///
    /// # Errors
    /// [`Foreign`](CacheError::Foreign) if the state was taken from a cache of another kind, with other options,
    /// or for another model; [`State`](CacheError::State) if a value is missing or does not fit;
    /// [`Unsupported`](CacheError::Unsupported).
    fn set_state(&mut self, state: &State) -> Result<(), CacheError> {
        let _ = state;
        Err(unsupported("continue from a state"))
    }

    /// Adds the sequences of another cache of the same kind behind those of this batch. `other` is its state. To
    /// replace a sequence, [select](Self::select_sequences) the others and join the new one. To take a sequence out as
    /// a cache of its own, select it in a [`fork`](Self::fork).
    ///
    /// # Errors
    /// Those of [`state`](Self::state) and [`set_state`](Self::set_state), [`State`](CacheError::State) if one of the two
    /// is parked and the model has sliding windows, and [`StepBytes`](CacheError::StepBytes) with a byte budget.
    /// Nothing has changed then.
    ///
    /// # Cost
    /// The entries of both are copied.
    ///
    /// ```
    /// # #[cfg(feature = "model")]
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use kv_direct::{CacheBackend, FullKv};
    /// # use kv_direct::{burn::tensor::Device, model::{Decoder, DecoderConfig}};
    /// # let decoder = Decoder::from_weights(DecoderConfig::new(97, 64, 3, 4, 2), &Device::flex(), |_, shape| {
    /// #     Ok::<_, std::convert::Infallible>(vec![0.01; shape.iter().product()])
    /// # })?;
    ///
    /// let (mut batch, mut one) = (FullKv::new(&decoder.shape()), FullKv::new(&decoder.shape()));
    /// decoder.forward(vec![vec![3, 1, 4], vec![1, 5]], &mut batch)?;
    /// decoder.forward(&[9, 2, 6, 5][..], &mut one)?;
    /// batch.join(&one.state()?)?;
    /// assert_eq!(batch.lengths(), [3, 2, 4]);
    /// // The second leaves, as a cache of its own.
    /// let mut left = batch.fork();
    /// left.select_sequences(&[1])?;
    /// batch.select_sequences(&[0, 2])?;
    /// assert_eq!((left.lengths(), batch.lengths()), (&[2][..], &[3, 4][..]));
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "model"))]
    /// # fn main() {}
    /// ```
    fn join(&mut self, other: &State) -> Result<(), CacheError> {
        let mut joined = self.state()?;
        joined.join(other)?;
        self.set_state(&joined)
    }

    /// Makes the cache as new, whatever happened before.
    fn clear(&mut self);

    /// An independent cache with the same content, an open draft included. Storage is shared until one of the two
    /// writes; the memory report of each counts all of it.
    fn fork(&self) -> Box<dyn CacheBackend>;
}

const fn unsupported(operation: &'static str) -> CacheError {
    CacheError::Unsupported { operation }
}
