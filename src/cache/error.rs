//! What a cache refuses, and why.

use std::error::Error;

use burn::tensor::DType;

use crate::{
    exact::conformance::{Conformance, Subject},
    positions::Positions,
};

/// Why a cache refused a call. A refused call changed nothing, unless the variant says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// No row of a step brings a token.
    #[error("the step has no tokens in any of its {rows} rows")]
    EmptyStep {
        /// Batch rows of the step.
        rows: usize,
    },
    /// A step leaves a gap, or takes tokens in twice.
    #[error("row {row} of the step starts at position {found}, but the cache expects {expected}")]
    Gap {
        /// The batch row.
        row: usize,
        /// Tokens taken in so far.
        expected: usize,
        /// Where the step starts.
        found: usize,
    },
    /// A step must say where each of its rows starts.
    #[error("the step has {rows} batch rows and {starts} starts")]
    Starts {
        /// Batch rows of the step.
        rows: usize,
        /// Starting positions given.
        starts: usize,
    },
    /// The number of batch rows is fixed by the first step.
    #[error("{found} batch rows were given, but the cache holds {expected}")]
    Rows {
        /// Rows of the cache.
        expected: usize,
        /// Rows of the step, or of the lengths to truncate to.
        found: usize,
    },
    /// An earlier step began and was not committed: its rows are in some layers only.
    #[error("an earlier step failed midway; clear the cache to go on")]
    Poisoned,
    /// A layer was called without a step, twice in one step, or out of order.
    #[error("layer {found} was called, but {}", expected.map_or("no layer is due".into(), |l| format!("layer {l} is due")))]
    LayerOrder {
        /// The layer that is due, if any.
        expected: Option<usize>,
        /// The layer that was called.
        found: usize,
    },
    /// `commit` came before every layer had its turn, or without a step.
    #[error("commit after {called} of {layers} layers")]
    Uncommittable {
        /// Layers called since the step began.
        called: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// A tensor does not have the shape that was promised.
    #[error("{what} have shape {found:?}, expected {expected:?}")]
    Shape {
        /// Which tensor.
        what: &'static str,
        /// The shape the model promises.
        expected: Vec<usize>,
        /// The shape that came.
        found: Vec<usize>,
    },
    /// The positions of a span are not those the step announced.
    #[error("the span has the positions {found}, the step announced {expected}")]
    SpanPositions {
        /// By the step.
        expected: Box<Positions>,
        /// By the span.
        found: Box<Positions>,
    },
    /// A tensor does not have the dtype of the model.
    #[error("{what} are {found:?}, expected {expected:?}")]
    Dtype {
        /// Which tensor.
        what: &'static str,
        /// The dtype of the model.
        expected: DType,
        /// The dtype that came.
        found: DType,
    },
    /// A model shape no model can have.
    #[error("the model's shape has {what} = {found}, which is no size")]
    ModelShape {
        /// Which size.
        what: &'static str,
        /// Its value.
        found: usize,
    },
    /// Truncation beyond the last token.
    #[error("cannot truncate to {to}: there are only {longest} tokens")]
    TruncateBeyond {
        /// The length asked for.
        to: usize,
        /// Tokens of the row, or of the longest where all are cut to one length.
        longest: usize,
    },
    /// Truncation to a point whose rows were dropped.
    #[error("cannot truncate row {row} to {to}: the oldest point that can be reached is {oldest}")]
    Irreversible {
        /// The batch row.
        row: usize,
        /// The length asked for.
        to: usize,
        /// The shortest length, apart from 0, that can be reached.
        oldest: usize,
    },
    /// A batch row that there is not.
    #[error("there is no batch row {row}: the cache holds {rows}")]
    NoRow {
        /// The row asked for.
        row: usize,
        /// Rows of the cache.
        rows: usize,
    },
    /// A checkpoint is open: restore or accept it first.
    #[error("a checkpoint is open: restore or accept it first")]
    CheckpointOpen,
    /// Nothing to restore or accept.
    #[error("no checkpoint is open")]
    NoCheckpoint,
    /// The backend has no such operation.
    #[error("this backend cannot {operation}")]
    Unsupported {
        /// What was asked for.
        operation: &'static str,
    },
    /// A state was taken from a cache of another kind, or built or fed differently.
    #[error("the state is of {what} {found}, this cache is of {expected}")]
    Foreign {
        /// What differs: the backend, its options, the model's shape.
        what: &'static str,
        /// Of this cache.
        expected: String,
        /// Of the state.
        found: String,
    },
    /// A state in which something is missing or does not fit the rest.
    #[error("the state's {entry} is wrong: {problem}")]
    State {
        /// Which entry.
        entry: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A budget too small to hold anything.
    #[error("a budget of {found} rows is too small: the smallest that works is {smallest}")]
    Budget {
        /// The budget asked for.
        found: usize,
        /// The smallest that works.
        smallest: usize,
    },
    /// A share of the prompt that is none.
    #[error("{found} is no share of a prompt: it must be above 0 and at most 1")]
    Ratio {
        /// The share asked for.
        found: f64,
    },
    /// Pooling needs a middle.
    #[error("a pooling kernel of {found} has no middle: it must be odd")]
    Kernel {
        /// The kernel asked for.
        found: usize,
    },
    /// The window whose queries choose is empty.
    #[error("a window of 0 queries chooses nothing: the smallest that works is 1")]
    SnapWindow,
    /// Keys cannot be re-indexed where a window counts original positions.
    #[error("keys cannot be re-indexed: layer {layer} has a window over original positions")]
    Reindexing {
        /// The layer.
        layer: usize,
    },
    /// A plan for another number of layers.
    #[error("the plan is about {found} layers, the model has {expected}")]
    PlanLayers {
        /// Layers of the model.
        expected: usize,
        /// Layers of the plan.
        found: usize,
    },
    /// A plan that keeps keys and values where the window is kept anyway.
    #[error(
        "the plan keeps old keys and values at layer {layer}, whose window is all that is ever seen"
    )]
    PlanWindow {
        /// The layer.
        layer: usize,
    },
    /// A plan would hold more than the keys and values it replaces.
    #[error(
        "residuals and what is kept beside them hold {residuals} bytes a token, the keys and values they \
         replace {keys_values}: nothing is saved"
    )]
    Larger {
        /// Bytes that the plan keeps of one old token.
        residuals: usize,
        /// Bytes of one token's keys and values in all layers.
        keys_values: usize,
    },
    /// A text that tells no speeds.
    #[error(
        "{text:?} tells no speeds: it must be like \"read 9e9; 64 rows: projection 5e10, block 6e10, attention 2e10\""
    )]
    Speeds {
        /// The text.
        text: String,
    },
    /// A step that would not fit the budget of bytes. One with fewer tokens may.
    #[error(
        "the step needs {needed} bytes, the budget is {budget}{}",
        kept_for(*differing)
    )]
    StepBytes {
        /// The budget.
        budget: usize,
        /// The most bytes that would be held within the step.
        needed: usize,
        /// Rows, of all layers, that stay because they had other bits when they were rebuilt.
        differing: usize,
    },
    /// A budget of bytes that no plan keeps within for such a context.
    #[error("a budget of {budget} bytes is too small: the smallest that works is {smallest}")]
    BudgetBytes {
        /// The budget asked for.
        budget: usize,
        /// The smallest that works.
        smallest: usize,
    },
    /// The device's kernels do not keep bits under the scheme, so nothing can be rebuilt exactly.
    #[error("rebuilt rows would not be exact on this device: {0}")]
    NotExact(Box<Conformance>),
    /// A conformance report that was measured for something else.
    #[error("the conformance report is about {found}, the model is {expected}")]
    Conformance {
        /// What the model is.
        expected: Box<Subject>,
        /// What was measured.
        found: Box<Subject>,
    },
    /// The decoder has no embedding, so token ids cannot be replayed.
    #[error("the decoder has no embedding to replay token ids from")]
    NoEmbedding,
    /// The decoder failed to rebuild rows.
    #[error("the decoder could not rebuild rows")]
    Replay(#[source] Box<dyn Error + Send + Sync>),
    /// Whatever a backend of another crate has to say.
    #[error("the backend failed")]
    Backend(#[source] Box<dyn Error + Send + Sync>),
}

/// Why more is held than a plan says.
fn kept_for(differing: usize) -> String {
    match differing {
        0 => String::new(),
        rows => format!("; {rows} rows stay because they had other bits when they were rebuilt"),
    }
}
