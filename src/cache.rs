//! The trait every backend implements, and the backends.
//!
//! Read this file first. A decoder runs a step through its layers; at each layer attention hands the
//! cache the new rows and gets back every row it may read. What a backend keeps between steps is its
//! own affair: all rows ([`FullKv`]), the newest ([`Window`]), or the newest and enough to rebuild
//! the rest ([`ResidualCheckpoint`]).

mod budget;
mod error;
mod evicting;
mod forward;
mod full_kv;
mod group;
mod h2o;
mod keep;
mod layered;
mod progress;
mod replay;
mod residual;
mod rows;
mod shape;
mod slots;
mod snap_kv;
mod span;
mod state;
mod step;
mod streaming_llm;
mod tova;
mod window;

use std::fmt;

pub use self::{
    budget::Budget,
    error::CacheError,
    full_kv::FullKv,
    group::Group,
    h2o::{H2o, H2oConfig},
    replay::Replay,
    residual::{
        ChunkSpeed, Floor, Old, Plan, Planner, Price, ResidualCheckpoint, ResidualConfig, Resuming,
        Speeds,
    },
    shape::ModelShape,
    snap_kv::{Pooling, SnapKv, SnapKvConfig},
    span::{Kept, KeysValues, Projection, Span},
    state::{Entry, State},
    step::{Step, TokenIds},
    streaming_llm::{Indexing, StreamingLlm, StreamingLlmConfig},
    tova::{Tova, TovaConfig},
    window::Window,
};
use crate::memory::MemoryReport;
use burn::tensor::Tensor;

/// Decides which past keys and values attention may read.
///
/// # Callers promise
/// * A step is [`begin`](Self::begin), then for every layer in order one
///   [`keys_values`](Self::keys_values) and, where [`wants`](Self::wants) asked for something, one
///   [`observe`](Self::observe), then [`commit`](Self::commit).
/// * Steps follow one another without gap or overlap, each row from position 0 on. The number of
///   batch rows does not change until [`clear`](Self::clear).
/// * Keys and values are finite: a query's sum runs over slots it cannot see as well, with weight 0, and
///   0 · ∞ is not 0.
/// * Keys come after QK-norm and rotation at their own positions; residuals are what the norm of the
///   block reads.
/// * The [`KeysValues`] of a call is dropped before the next one.
///
/// # Implementors promise
/// * The rows just given are in the answer, with everything else the backend shows.
/// * Positions say what a row is, never where it is stored. They are original positions unless the
///   backend says that it re-indexes.
/// * Rows are dropped after a step's attention, never before; the budget holds once the step is
///   committed, or accepted where it was a [draft](Self::checkpoint).
/// * All validation of a step is in `begin`: a call refused there, or outside a step, leaves the cache as
///   it was. A layer that fails has failed the step: every later call but `clear`, `set_state` and the
///   questions is [`Poisoned`](CacheError::Poisoned), and so is a `begin` while a step is open.
/// * In a layer with a window ([`ModelShape::windows`]) nothing is dropped that a next query sees, nor
///   what it would see if the last call were undone. Older rows are seen by nobody and may go.
/// * Pads are never kept and never counted; a batch row never depends on its neighbours.
/// * [`memory`](Self::memory) counts every byte held that grows with the context.
///
/// # Shapes
/// New keys and values `[batch, kv_heads, tokens, head_dim]`, residuals `[batch, tokens, hidden]`;
/// the answer as [`KeysValues`] says. Batch rows are left-aligned and may differ in length.
///
/// # Errors
/// [`CacheError`], each variant naming both sides. A backend of another crate puts its own errors
/// into [`CacheError::Backend`].
///
/// # Cost
/// Each backend's own page says what it keeps and what a step costs. `FullKv` and `Window` append in
/// place and copy only when their buffers grow or shrink by a piece.
///
/// # Writing your own
/// A backend that shows each call nothing but itself, which is the shortest one that keeps the
/// promises (a real one stores rows between steps):
///
/// ```
/// use burn::tensor::Tensor;
/// use kv_direct::cache::{CacheBackend, CacheError, Kept, KeysValues, LayerIndex, Projection, Span, Step};
/// use kv_direct::{exact::PIECE, memory::MemoryReport, positions::Positions};
///
/// #[derive(Debug, Clone, Default)]
/// struct Forgetful {
///     lengths: Vec<usize>,
///     adding: Option<Vec<usize>>,
/// }
///
/// impl CacheBackend for Forgetful {
///     fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
///         let (found, rows) = (step.starts().len(), self.lengths.len());
///         if self.adding.is_some() {
///             return Err(CacheError::Poisoned);
///         }
///         if rows > 0 && rows != found {
///             return Err(CacheError::Rows { expected: rows, found });
///         }
///         for (row, &found) in step.starts().iter().enumerate() {
///             if found != self.position(row) {
///                 return Err(CacheError::Gap { row, expected: self.position(row), found });
///             }
///         }
///         self.adding = Some(step.tokens().lengths());
///         Ok(())
///     }
///
///     fn keys_values(&mut self, _: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
///         let Projection { keys, values } = span.projection;
///         let [batch, heads, tokens, width] = keys.dims();
///         let slots = tokens.next_multiple_of(PIECE);
///         let free = |shape: [usize; 4]| Tensor::zeros(shape, (&keys.device(), keys.dtype()));
///         // Keys lie transposed in memory: a view that only looks so gives other bits.
///         let keys = free([batch, heads, width, slots])
///             .slice_assign([0..batch, 0..heads, 0..width, 0..tokens], keys.clone().swap_dims(2, 3));
///         let values = free([batch, heads, slots, width])
///             .slice_assign([0..batch, 0..heads, 0..tokens, 0..width], values.clone());
///         let mut positions = Vec::new();
///         for row in 0..batch {
///             let mut held = span.positions.slots(row, 0).to_vec();
///             held.resize(slots, Positions::EMPTY);
///             positions.push(held);
///         }
///         KeysValues::new(keys, values, Positions::from_rows(&positions))
///     }
///
///     fn commit(&mut self) -> Result<(), CacheError> {
///         let adding = self.adding.take().ok_or(CacheError::Uncommittable { called: 0, layers: 1 })?;
///         self.lengths.resize(adding.len(), 0);
///         self.lengths.iter_mut().zip(adding).for_each(|(length, more)| *length += more);
///         Ok(())
///     }
///
///     fn position(&self, row: usize) -> usize {
///         self.lengths.get(row).copied().unwrap_or(0)
///     }
///
///     fn kept(&self, _: LayerIndex) -> Kept {
///         Kept::shared(vec![vec![]; self.lengths.len()])
///     }
///
///     fn memory(&self) -> MemoryReport {
///         MemoryReport::default()
///     }
///
///     fn rows(&self) -> usize {
///         self.lengths.len()
///     }
///
///     fn truncate_rows(&mut self, to: &[usize]) -> Result<(), CacheError> {
///         if self.adding.is_some() {
///             return Err(CacheError::Poisoned);
///         }
///         if to.len() != self.rows() {
///             return Err(CacheError::Rows { expected: self.rows(), found: to.len() });
///         }
///         let mut rows = to.iter().zip(&self.lengths);
///         if let Some((&to, &longest)) = rows.find(|(to, length)| to > length) {
///             return Err(CacheError::TruncateBeyond { to, longest });
///         }
///         if to.iter().all(|&to| to == 0) {
///             self.clear();
///         } else {
///             self.lengths = to.to_vec();
///         }
///         Ok(())
///     }
///
///     fn clear(&mut self) {
///         *self = Self::default();
///     }
///
///     fn fork(&self) -> Box<dyn CacheBackend> {
///         Box::new(self.clone())
///     }
/// }
///
/// # #[cfg(feature = "model")]
/// # fn run() -> Result<(), Box<dyn std::error::Error>> {
/// # use kv_direct::model::{Decoder, DecoderConfig};
/// # let device = burn::tensor::Device::flex();
/// # let decoder = Decoder::from_weights(DecoderConfig::new(97, 64, 3, 4, 2), &device, |_, shape| {
/// #     Ok::<_, std::convert::Infallible>(vec![0.01; shape.iter().product()])
/// # })?;
/// let mut cache = Forgetful::default();
/// decoder.forward(&[3, 1, 4][..], &mut cache)?;
/// decoder.forward(&[1][..], &mut cache)?;
/// assert_eq!(cache.position(0), 4);
/// # Ok(())
/// # }
/// # #[cfg(feature = "model")]
/// # run().unwrap();
/// ```
pub trait CacheBackend: fmt::Debug + Send {
    /// Announces a step. Everything that can be refused is refused here.
    ///
    /// # Errors
    /// [`Gap`](CacheError::Gap), [`Rows`](CacheError::Rows), [`Poisoned`](CacheError::Poisoned).
    fn begin(&mut self, step: &Step) -> Result<(), CacheError>;

    /// Takes in the rows of `span` at `layer` and answers every row attention may read there.
    ///
    /// # Errors
    /// [`LayerOrder`](CacheError::LayerOrder), [`SpanPositions`](CacheError::SpanPositions),
    /// [`Shape`](CacheError::Shape), [`Dtype`](CacheError::Dtype), [`Poisoned`](CacheError::Poisoned), and
    /// whatever a replay runs into. The step has then failed.
    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError>;

    /// What attention must hand back for this layer and step. By default nothing, which costs
    /// nothing. A decoder that cannot give what is asked for must fail the step.
    fn wants(&self, layer: LayerIndex, step: &Step) -> Observation {
        let _ = (layer, step);
        Observation::Nothing
    }

    /// Called once per layer after its attention, with what [`wants`](Self::wants) asked for. Not
    /// called where that was nothing.
    ///
    /// # Errors
    /// The backend's own. The step has then failed.
    fn observe(&mut self, layer: LayerIndex, seen: Observed) -> Result<(), CacheError> {
        let _ = (layer, seen);
        Ok(())
    }

    /// Ends the step: it is over in all layers, and what the budget does not cover is dropped.
    ///
    /// # Errors
    /// [`Uncommittable`](CacheError::Uncommittable) if a layer had no turn.
    fn commit(&mut self) -> Result<(), CacheError>;

    /// Tokens taken in by a batch row; 0 for a row that does not exist. Never the number of rows
    /// kept.
    fn position(&self, row: usize) -> usize;

    /// The positions a next query could read at `layer`, by batch row; no rows where there is no
    /// such layer.
    fn kept(&self, layer: LayerIndex) -> Kept;

    /// Bytes held, by part.
    fn memory(&self) -> MemoryReport;

    /// Batch rows; 0 before the first step.
    fn rows(&self) -> usize;

    /// Takes every batch row back to its length in `to`, in all layers or none. Where all become 0 it is as
    /// good as [`clear`](Self::clear). The last call of a lossless backend can always be undone, by the
    /// lengths before it; a row that is to keep its length is not touched.
    ///
    /// # Errors
    /// [`Rows`](CacheError::Rows) for another number of rows,
    /// [`TruncateBeyond`](CacheError::TruncateBeyond) where a row is shorter than that,
    /// [`Irreversible`](CacheError::Irreversible) where rows needed there were dropped,
    /// [`Poisoned`](CacheError::Poisoned) while a step is open.
    ///
    /// # Cost
    /// Where a backend dropped nothing, what the tokens taken back cost, however many stay.
    fn truncate_rows(&mut self, to: &[usize]) -> Result<(), CacheError>;

    /// [`truncate_rows`](Self::truncate_rows) with one length for all: forgets the tokens from position `to`
    /// on in every row that has them.
    ///
    /// # Errors
    /// [`TruncateBeyond`](CacheError::TruncateBeyond) if no row is that long, and those of
    /// [`truncate_rows`](Self::truncate_rows).
    fn truncate(&mut self, to: usize) -> Result<(), CacheError> {
        let lengths = (0..self.rows()).map(|row| self.position(row));
        let longest = lengths.clone().max().unwrap_or(0);
        let shortened: Vec<usize> = lengths.map(|length| to.min(length)).collect();
        // Where all keep their length, this refuses what any truncation would be refused for.
        self.truncate_rows(&shortened)?;
        if to > longest {
            return Err(CacheError::TruncateBeyond { to, longest });
        }
        Ok(())
    }

    /// Opens a draft: tokens that come from now on may turn out to be wrong. Nothing is dropped until
    /// [`restore`](Self::restore) takes all of them back or [`accept`](Self::accept) keeps what is left of
    /// them; truncation goes back to here at most (and to nothing, which ends the draft).
    ///
    /// What is kept of this point is its lengths. Of attention that a policy looks at, `heads` f32 for every
    /// slot, layer and token of the draft are kept: a draft is meant to be short.
    ///
    /// # Errors
    /// [`CheckpointOpen`](CacheError::CheckpointOpen), [`Poisoned`](CacheError::Poisoned),
    /// [`Unsupported`](CacheError::Unsupported) where a backend has no drafts.
    fn checkpoint(&mut self) -> Result<(), CacheError> {
        Err(unsupported("keep a draft apart"))
    }

    /// Ends the draft and takes all of its tokens back: the cache goes on as if they had never come.
    ///
    /// # Errors
    /// [`NoCheckpoint`](CacheError::NoCheckpoint), [`Poisoned`](CacheError::Poisoned),
    /// [`Unsupported`](CacheError::Unsupported).
    fn restore(&mut self) -> Result<(), CacheError> {
        Err(unsupported("keep a draft apart"))
    }

    /// Ends the draft and keeps its tokens, as far as they were not truncated: rows are dropped as if these
    /// tokens had come in one call; a prompt ends where a call of the draft ended it. Scores are then sums over single queries, which may differ from those
    /// of a call in the last bit.
    ///
    /// # Errors
    /// [`NoCheckpoint`](CacheError::NoCheckpoint), [`Poisoned`](CacheError::Poisoned),
    /// [`Unsupported`](CacheError::Unsupported).
    fn accept(&mut self) -> Result<(), CacheError> {
        Err(unsupported("keep a draft apart"))
    }

    /// Makes the batch these rows of it, in this order: drops, reorders and, for beams, repeats rows.
    ///
    /// # Errors
    /// [`NoRow`](CacheError::NoRow), [`CheckpointOpen`](CacheError::CheckpointOpen),
    /// [`Poisoned`](CacheError::Poisoned), [`Unsupported`](CacheError::Unsupported).
    ///
    /// # Cost
    /// A copy of the rows that stay; none where all stay in their places.
    fn select_rows(&mut self, rows: &[usize]) -> Result<(), CacheError> {
        let _ = rows;
        Err(unsupported("select batch rows"))
    }

    /// Falls to the floor of memory: what can be rebuilt is dropped, and the next step rebuilds it. Bits
    /// stay what they would have been.
    ///
    /// # Errors
    /// [`Poisoned`](CacheError::Poisoned), and [`Unsupported`](CacheError::Unsupported) for a backend that
    /// rebuilds nothing.
    fn park(&mut self) -> Result<(), CacheError> {
        Err(unsupported("be parked: it rebuilds nothing"))
    }

    /// Everything a cache like this one needs to go on from here. It shares storage: the next append
    /// copies as long as it lives.
    ///
    /// # Errors
    /// [`CheckpointOpen`](CacheError::CheckpointOpen), [`Poisoned`](CacheError::Poisoned),
    /// [`Unsupported`](CacheError::Unsupported).
    fn state(&self) -> Result<State, CacheError> {
        Err(unsupported("hand out its state"))
    }

    /// Goes on from `state`, whatever happened to the cache before. One that is refused changes nothing.
    ///
    /// # Errors
    /// [`Foreign`](CacheError::Foreign) where it was taken from a cache of another kind, options or model,
    /// [`State`](CacheError::State) where an entry is missing or does not fit,
    /// [`Unsupported`](CacheError::Unsupported).
    fn set_state(&mut self, state: &State) -> Result<(), CacheError> {
        let _ = state;
        Err(unsupported("go on from a state"))
    }

    /// Makes the cache as new, whatever happened to it.
    fn clear(&mut self);

    /// An independent cache with the same content, its open checkpoint included. Storage is shared until
    /// one of the two writes; both count it as theirs.
    fn fork(&self) -> Box<dyn CacheBackend>;
}

/// A layer, counted from 0.
///
/// ```
/// assert_eq!(kv_direct::cache::LayerIndex::new(3).index(), 3);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerIndex(usize);

impl LayerIndex {
    /// The layer with this number.
    #[must_use]
    pub const fn new(index: usize) -> Self {
        Self(index)
    }

    /// The layer's number.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0
    }
}

/// What a backend wants to see of a layer's attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Observation {
    /// Nothing.
    Nothing,
    /// For every query head the probability each slot got, added up over the step's queries.
    ColumnSums,
    /// For every query head the probabilities of the step's last queries, this many of every batch row.
    LastRows(usize),
}

/// What attention hands back: what an [`Observation`] asked for.
#[derive(Debug)]
#[non_exhaustive]
pub enum Observed {
    /// `[batch, heads, slots]` in f32, slots as in the answer of
    /// [`keys_values`](CacheBackend::keys_values).
    ColumnSums(Tensor<3>),
    /// `[batch, heads, rows, slots]` in f32, the newest query of each batch row last; `rows` is what was
    /// asked for or the tokens of the step, if these are fewer. Batch rows with fewer begin with zeros.
    LastRows(Tensor<4>),
}

const fn unsupported(operation: &'static str) -> CacheError {
    CacheError::Unsupported { operation }
}

fn _object_safe(_: &dyn CacheBackend) {}
