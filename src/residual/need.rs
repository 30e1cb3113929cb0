//! How many bytes a step holds at most. Byte budgets and the planner use this arithmetic.

use super::{Plan, Retain};
use crate::{
    cache::ModelShape,
    exact::{PANEL, grown, whole},
};

/// How large a step is.
#[derive(Debug, Clone)]
pub(crate) struct StepSize {
    /// Tokens of each sequence before the step, and after it.
    pub(crate) tokens: Vec<(usize, usize)>,
    /// Tokens that sliding-window layers hold beyond their window: those of the step, and of the open draft.
    pub(crate) recent: usize,
    /// Top layers that the plan rebuilds but that held every entry before the step.
    pub(crate) complete_before: usize,
    /// The same after it.
    pub(crate) complete_after: usize,
    /// Whether entries have to be rebuilt: old ones, and after parking all of them.
    pub(crate) missing: bool,
    /// Whether sliding windows have to be rebuilt too: after parking, and after a deep truncation.
    pub(crate) windows_missing: bool,
    /// Whether entries are rebuilt and compared before they are dropped.
    pub(crate) certified: bool,
    /// Entries, of all layers, that stay because they differed.
    pub(crate) differing: usize,
}

impl StepSize {
    /// A step of one token after `context` tokens in each of `sequences` sequences.
    pub(crate) fn decode(plan: &Plan, sequences: usize, context: usize) -> Self {
        Self {
            tokens: vec![(context, context + 1); sequences],
            recent: 1,
            complete_before: 0,
            complete_after: 0,
            missing: context > plan.hot(),
            windows_missing: true,
            certified: false,
            differing: 0,
        }
    }

    /// Tokens of the longest sequence before the step, and after it.
    pub(crate) fn longest(&self) -> (usize, usize) {
        let tokens = self.tokens.iter().copied();
        let longest =
            |one: (usize, usize), other: (usize, usize)| (one.0.max(other.0), one.1.max(other.1));
        tokens.reduce(longest).unwrap_or_default()
    }

    /// The sum of what each sequence takes, of its tokens before the step and after it.
    fn sum(&self, of: impl Fn(usize, usize) -> usize) -> usize {
        let tokens = self.tokens.iter();
        tokens.map(|&(before, after)| of(before, after)).sum()
    }
}

/// The most bytes that a step holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Need {
    /// Between this step and the next.
    pub(crate) between: usize,
    /// On top of that, within it.
    pub(crate) scratch: usize,
}

impl Need {
    /// Both.
    pub(crate) const fn peak(self) -> usize {
        self.between + self.scratch
    }

    pub(crate) fn of(shape: &ModelShape, plan: &Plan, size: &StepSize) -> Self {
        let bytes = Bytes::new(shape);
        let layers = (0..shape.layers()).map(|layer| {
            let slots = |_, after| slots(shape, plan, size, after, layer);
            bytes.slot * size.sum(slots)
        });
        let retained = (0..shape.layers()).filter(|&l| plan.retain(l) == Retain::Residual);
        let residuals = size.sum(|_, after| after.next_multiple_of(plan.chunk()));
        let ids = usize::from(plan.retains_ids()) * size_of::<u32>();
        let ids = ids * size.sum(|_, after| grown(after));
        let differing = bytes.slot * size.differing;
        let between = layers.clone().sum::<usize>()
            + retained.count() * bytes.residual * residuals
            + ids
            + differing;

        // A layer's buffers beside the larger or smaller ones that replace them.
        let moving = layers.max().unwrap_or(0) + differing;
        let assembles = rebuilt(shape, plan).count() > size.complete_after;
        let older = if assembles {
            bytes.slot * size.sum(|_, after| older(plan, size.certified, after))
        } else {
            0
        };
        let replayed = size.missing || assembles && size.longest().1 > plan.hot();
        let scratch = if replayed {
            // A resume works on ids of its own.
            older + ids + replay(shape, plan, size, &bytes, moving)
        } else {
            moving + older
        };
        Self { between, scratch }
    }
}

/// The layers whose entries a plan drops, lowest first.
pub(crate) fn rebuilt<'a>(
    shape: &'a ModelShape,
    plan: &'a Plan,
) -> impl DoubleEndedIterator<Item = usize> + 'a {
    (0..shape.layers()).filter(|&layer| plan.rebuilds(layer))
}

/// Bytes of a replay beside the entries that attention reads: the carried residual, and the most that a layer takes,
/// where stores move `moving` bytes.
fn replay(shape: &ModelShape, plan: &Plan, size: &StepSize, bytes: &Bytes, moving: usize) -> usize {
    let (sequences, longest) = (size.tokens.len(), size.longest().1);
    let chunk = plan.chunk();
    let projection = shape.projection_scratch(chunk);
    let block = |leaves: bool, slots: usize| match leaves {
        true => shape.block_scratch(sequences, chunk, slots).max(projection),
        false => projection,
    };
    let (mut carried, mut most) = (0, moving);
    let complete = size.complete_before.min(size.complete_after);
    let complete: Vec<usize> = rebuilt(shape, plan).rev().take(complete).collect();
    let missing = |layer: usize| match shape.slides(layer) {
        true => size.windows_missing,
        false => plan.rebuilds(layer) && !complete.contains(&layer),
    };
    for (layer, flow) in plan.flow(missing).into_iter().enumerate() {
        if !flow.enters {
            continue;
        }
        if plan.retain(layer) != Retain::Residual || flow.leaves {
            let rows = |before: usize, after: usize| match (size.certified, shape.own_kernels) {
                (true, _) => after.next_multiple_of(chunk),
                (false, false) => before.next_multiple_of(chunk),
                (false, true) => before,
            };
            carried = bytes.residual * size.sum(rows);
        }
        let here = match shape.windows[layer] {
            // Two buffers while one replaces the other.
            Some(window) => {
                let slots = |after: usize| whole(after.min(beyond(window.get(), chunk)));
                let reach = bytes.slot * size.sum(|_, after| slots(after));
                2 * reach + block(flow.leaves, slots(longest))
            }
            None => {
                let hot = |_, after: usize| grown(after).min(plan.slots(size.certified));
                bytes.slot * size.sum(hot) + block(flow.leaves, whole(longest))
            }
        };
        most = most.max(here);
    }
    carried + most
}

/// The most slots of a sequence that all rebuilt layers share: for what their stores do not have, with certified eviction for all. A
/// bound that falls only where the slots of hot entries rise, so that more hot tokens never need fewer bytes.
fn older(plan: &Plan, certified: bool, after: usize) -> usize {
    let all = whole(after);
    match certified {
        true => all,
        false => all.min((all + 2 * PANEL).saturating_sub(plan.slots(false))),
    }
}

/// Slots that a layer's store holds for a sequence of `after` tokens after a step.
fn slots(shape: &ModelShape, plan: &Plan, size: &StepSize, after: usize, layer: usize) -> usize {
    if let Some(window) = shape.windows[layer] {
        return whole(after.min(beyond(window.get(), size.recent)));
    }
    let mut complete = rebuilt(shape, plan).rev().take(size.complete_after);
    if !plan.rebuilds(layer) || complete.any(|complete| complete == layer) {
        return grown(after);
    }
    grown(after).min(plan.slots(size.certified))
}

/// Slots that a sliding window takes, with the panel that it starts in and `more` entries. Windows may be as large as
/// integers are.
const fn beyond(window: usize, more: usize) -> usize {
    window.saturating_add(PANEL).saturating_add(more)
}

/// Bytes of what is held.
struct Bytes {
    /// Of an entry of a layer, and of the position it has.
    slot: usize,
    /// Of the residual of a token.
    residual: usize,
}

impl Bytes {
    fn new(shape: &ModelShape) -> Self {
        Self {
            slot: 2 * shape.kv_width() * shape.cache_dtype.size() + size_of::<usize>(),
            residual: shape.hidden * shape.dtype.size(),
        }
    }
}
