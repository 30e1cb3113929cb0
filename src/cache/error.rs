//! What a cache refuses, and why.

use std::error::Error;

use burn::tensor::DType;

use crate::{
    cache::Observation,
    exact::{Conformance, Subject},
    positions::Positions,
};

/// Why a cache refused a call. A refused call changed nothing, unless the variant says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// No sequence of a step brings a token.
    #[error("the step has no tokens in any of its {sequences} sequences")]
    EmptyStep {
        /// Sequences of the step.
        sequences: usize,
    },
    /// A step leaves a gap, or repeats tokens.
    #[error(
        "sequence {sequence} of the step starts at position {found}, but the cache expects {expected}"
    )]
    Gap {
        /// The sequence.
        sequence: usize,
        /// Tokens processed so far.
        expected: usize,
        /// Where the step starts.
        found: usize,
    },
    /// A step must say where each of its sequences starts.
    #[error("the step has {sequences} sequences and {starts} starts")]
    Starts {
        /// Sequences of the step.
        sequences: usize,
        /// Starting positions given.
        starts: usize,
    },
    /// The number of sequences is fixed by the first step, and is 1 with certified eviction.
    #[error("{found} sequences were given, expected {expected}")]
    Sequences {
        /// Sequences of the cache, or 1 with certified eviction.
        expected: usize,
        /// Sequences of the step or the selection, or lengths to truncate to.
        found: usize,
    },
    /// A step is open, or has failed. Its entries are in some layers only.
    #[error("a step is open or has failed: commit it, or clear the cache")]
    Poisoned,
    /// A layer was called outside a step, twice in one step, or out of order.
    #[error("layer {found} was called, but {}", expected.map_or("no layer is due".into(), |l| format!("layer {l} is due")))]
    LayerOrder {
        /// The layer that is due, if any.
        expected: Option<usize>,
        /// The layer that was called.
        found: usize,
    },
    /// Attention reported something else than the cache asked for. The step has failed.
    #[error("layer {layer} expects attention to report {expected}, but received {found}")]
    Observation {
        /// The layer.
        layer: usize,
        /// What the cache still waits for.
        expected: Observation,
        /// What it received.
        found: Observation,
    },
    /// Attention did not report what the cache asked for. The step has failed.
    #[error("layer {layer} expects attention to report {expected}, but received no report")]
    NotObserved {
        /// The layer.
        layer: usize,
        /// What the cache asked for.
        expected: Observation,
    },
    /// `commit` came before every layer was called, or outside a step.
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
        /// The expected shape.
        expected: Vec<usize>,
        /// The shape found.
        found: Vec<usize>,
    },
    /// The positions of a span are not those of the step.
    #[error("the span has the positions {found}, the step announced {expected}")]
    SpanPositions {
        /// Of the step.
        expected: Box<Positions>,
        /// Of the span.
        found: Box<Positions>,
    },
    /// A tensor does not have the dtype of the model.
    #[error("{what} are {found:?}, expected {expected:?}")]
    Dtype {
        /// Which tensor.
        what: &'static str,
        /// The dtype of the model.
        expected: DType,
        /// The dtype found.
        found: DType,
    },
    /// A model shape that no model can have.
    #[error("the model's shape has {what} = {found}, which no model can have")]
    ModelShape {
        /// Which size.
        what: &'static str,
        /// Its value.
        found: usize,
    },
    /// A size that the model's shape leaves open, though a byte budget or a cost depends on it.
    #[error("the model's shape does not say {what}: bytes cannot be bounded without it")]
    UnknownSize {
        /// The field.
        what: &'static str,
    },
    /// Truncation beyond the last token.
    #[error("cannot truncate to {to}: there are only {longest} tokens")]
    TruncateBeyond {
        /// The length asked for.
        to: usize,
        /// Tokens of the sequence.
        longest: usize,
    },
    /// Truncation to a point that needs evicted entries.
    #[error(
        "cannot truncate sequence {sequence} to {to}: the shortest length in reach is {shortest}"
    )]
    Irreversible {
        /// The sequence.
        sequence: usize,
        /// The length asked for.
        to: usize,
        /// The shortest length in reach, apart from 0.
        shortest: usize,
    },
    /// A sequence that does not exist.
    #[error("there is no sequence {sequence}: the cache holds {sequences}")]
    NoSequence {
        /// The sequence asked for.
        sequence: usize,
        /// Sequences of the cache.
        sequences: usize,
    },
    /// A draft is open: end it first.
    #[error("a draft is open: end it first")]
    DraftOpen,
    /// There is no draft to end.
    #[error("no draft is open")]
    NoDraft,
    /// The backend has no such operation.
    #[error("this backend cannot {operation}")]
    Unsupported {
        /// What was asked for.
        operation: &'static str,
    },
    /// A state of a cache of another kind, with other options, or for another model.
    #[error("the state has {what} {found}, this cache has {expected}")]
    Foreign {
        /// What differs: the backend, an option, the model's shape.
        what: String,
        /// Of this cache.
        expected: String,
        /// Of the state.
        found: String,
    },
    /// A state in which a value is missing or does not fit the rest.
    #[error("the state's {value} is wrong: {problem}")]
    State {
        /// Which value.
        value: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A token budget too small to hold anything.
    #[error("a budget of {found} tokens is too small: the smallest that works is {smallest}")]
    Budget {
        /// The budget asked for.
        found: usize,
        /// The smallest that works.
        smallest: usize,
    },
    /// A share of the prompt outside (0, 1].
    #[error("{found} is no share of a prompt: it must be above 0 and at most 1")]
    Ratio {
        /// The share asked for.
        found: f64,
    },
    /// A pooling kernel without a middle.
    #[error("a pooling kernel of {found} has no middle: it must be odd")]
    Kernel {
        /// The kernel asked for.
        found: usize,
    },
    /// An observation window without a query.
    #[error("an observation window of 0 queries selects nothing: the smallest that works is 1")]
    SnapWindow,
    /// Keys cannot be re-indexed where a sliding window counts original positions.
    #[error("keys cannot be re-indexed: layer {layer} has a window over original positions")]
    Reindexing {
        /// The layer.
        layer: usize,
    },
    /// Keys that are not rotated by their positions cannot be re-indexed.
    #[error("keys cannot be re-indexed: the model does not rotate them by their positions")]
    NotRotary,
    /// A plan for another number of layers.
    #[error("the plan covers {found} layers, the model has {expected}")]
    PlanLayers {
        /// Layers of the model.
        expected: usize,
        /// Layers of the plan.
        found: usize,
    },
    /// A plan that retains keys and values in a sliding-window layer.
    #[error(
        "the plan retains old keys and values at layer {layer}, which only ever needs its window"
    )]
    PlanWindow {
        /// The layer.
        layer: usize,
    },
    /// A plan that would hold more than the keys and values it replaces.
    #[error(
        "the plan holds {residuals} bytes a token, the keys and values it replaces {keys_values}: nothing is saved"
    )]
    Larger {
        /// Bytes that the plan holds for one old token.
        residuals: usize,
        /// Bytes of one token's keys and values in all layers.
        keys_values: usize,
    },
    /// A context too long to compute a cost for.
    #[error("a context of {found} tokens is too long: the longest is {longest}")]
    Context {
        /// Tokens asked for.
        found: usize,
        /// The most tokens.
        longest: usize,
    },
    /// A text that is no throughput.
    #[error(
        "{text:?} is no throughput: it must be like \"read 9e9; 64 tokens: projection 5e10, block 6e10, attention 2e10\""
    )]
    Throughput {
        /// The text.
        text: String,
    },
    /// A step that would not fit the byte budget. One with fewer tokens may.
    #[error("the step needs {needed} bytes, the budget is {budget}{}", kept_for(*differing))]
    StepBytes {
        /// The budget.
        budget: usize,
        /// The most bytes that would be held within the step.
        needed: usize,
        /// Entries, of all layers, that stay because they had other bits when they were rebuilt.
        differing: usize,
    },
    /// A byte budget that no plan can keep for such a context.
    #[error("a budget of {budget} bytes is too small: the smallest that works is {smallest}")]
    BudgetBytes {
        /// The budget asked for.
        budget: usize,
        /// The smallest that works.
        smallest: usize,
    },
    /// The device's kernels do not repeat bits, so nothing can be rebuilt exactly.
    #[error("rebuilt entries would not be exact on this device: {0}")]
    NotExact(Box<Conformance>),
    /// A conformance report of something else.
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
    /// The decoder failed to rebuild entries.
    #[error("the decoder could not rebuild entries")]
    Replay(#[source] Box<dyn Error + Send + Sync>),
    /// An error of a backend of another crate.
    #[error("the backend failed")]
    Backend(#[source] Box<dyn Error + Send + Sync>),
}

/// Why more is held than the plan says.
fn kept_for(differing: usize) -> String {
    match differing {
        0 => String::new(),
        entries => {
            format!("; {entries} entries stay because they had other bits when they were rebuilt")
        }
    }
}
