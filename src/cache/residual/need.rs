//! How many bytes a [`ResidualCheckpoint`](super::ResidualCheckpoint) holds at most: the arithmetic that a
//! budget is held by, and that plans are priced by.

use super::{Old, Plan};
use crate::{cache::ModelShape, exact::PIECE};

/// Where a cache stands when a step comes. Of a batch the longest row counts for all.
#[derive(Debug, Clone, Copy)]
pub(super) struct Standing {
    /// Batch rows.
    pub(super) rows: usize,
    /// Tokens before the step.
    pub(super) before: usize,
    /// Tokens after it.
    pub(super) after: usize,
    /// Tokens that windows hold beyond what they show: those of the step, and of the open draft.
    pub(super) recent: usize,
    /// Top layers, of those that the plan rebuilds, that hold every row all the same before the step.
    pub(super) held: usize,
    /// The same after it.
    pub(super) whole: usize,
    /// Whether rows have to be rebuilt: old ones, and after parking all of them.
    pub(super) missing: bool,
    /// Whether rows of windows may have to be rebuilt too: after parking, and after deep truncation.
    pub(super) windows: bool,
    /// Whether rows are rebuilt and compared before they are let go of.
    pub(super) certified: bool,
    /// Rows that were kept because they differed, of all layers together.
    pub(super) differing: usize,
}

/// Bytes a step holds at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Need {
    /// Between this step and the next.
    pub(super) between: usize,
    /// On top of that, within it.
    pub(super) scratch: usize,
}

impl Need {
    /// All of it.
    pub(super) const fn peak(self) -> usize {
        self.between + self.scratch
    }

    pub(super) fn of(shape: &ModelShape, plan: &Plan, standing: Standing) -> Self {
        let bytes = Bytes::new(shape, standing.rows);
        let after = standing.after;
        let layers =
            (0..shape.layers()).map(|layer| bytes.slots(slots(shape, plan, standing, layer)));
        let residuals = (0..shape.layers()).filter(|&layer| plan.old(layer) == Old::Residual);
        let ids = usize::from(plan.keeps_ids()) * size_of::<u32>() * whole(after);
        let ids = standing.rows * ids;
        let between = layers.clone().sum::<usize>()
            + residuals.count() * bytes.residuals(after.next_multiple_of(plan.chunk()))
            + ids
            + bytes.slots(standing.differing);

        // A layer's buffers beside the larger or smaller ones that take their place.
        let moving = layers.max().unwrap_or(0) + bytes.slots(standing.differing);
        let limited = rebuilt(shape, plan).count() > standing.whole;
        let answer = if limited {
            bytes.slots(whole(after))
        } else {
            0
        };
        let replayed = standing.missing || limited && after > plan.hot();
        let scratch = if replayed {
            // A resume works on ids of its own.
            answer + ids + replay(shape, plan, standing, &bytes, moving)
        } else {
            // Rows that are no whole pieces are read from a padded copy.
            moving + answer
        };
        Self { between, scratch }
    }
}

/// The layers of which a plan lets rows go, lowest first.
pub(super) fn rebuilt<'a>(
    shape: &'a ModelShape,
    plan: &'a Plan,
) -> impl DoubleEndedIterator<Item = usize> + 'a {
    (0..shape.layers()).filter(|&layer| plan.rebuilds(layer))
}

/// Bytes of a replay beside the rows that attention reads: the carried residual, and the most that a layer takes,
/// where stores move `moving` bytes.
fn replay(
    shape: &ModelShape,
    plan: &Plan,
    standing: Standing,
    bytes: &Bytes,
    moving: usize,
) -> usize {
    let Standing {
        rows,
        before,
        after,
        ..
    } = standing;
    let chunk = plan.chunk();
    let projection = shape.projection_scratch(rows, chunk);
    let block = |leaves: bool, slots: usize| match leaves {
        true => shape.block_scratch(rows, chunk, slots).max(projection),
        false => projection,
    };
    let (mut carried, mut most) = (0, moving);
    let held = standing.held.min(standing.whole);
    let held: Vec<usize> = rebuilt(shape, plan).rev().take(held).collect();
    let missing = |layer: usize| match shape.slides(layer) {
        true => standing.windows,
        false => plan.rebuilds(layer) && !held.contains(&layer),
    };
    for (layer, flow) in plan.flow(missing).into_iter().enumerate() {
        if !flow.enters {
            continue;
        }
        if plan.old(layer) != Old::Residual || flow.leaves {
            let carrying = if standing.certified { after } else { before };
            carried = bytes.residuals(carrying.next_multiple_of(chunk));
        }
        let here = match shape.windows[layer] {
            // Two buffers while one takes the place of the other.
            Some(window) => {
                let slots = whole(after.min(window.get() + PIECE + chunk));
                2 * bytes.slots(slots) + block(flow.leaves, slots)
            }
            None => {
                let hot = bytes.slots(whole(after).min(plan.limit(true)));
                hot + block(flow.leaves, whole(after))
            }
        };
        most = most.max(here);
    }
    carried + most
}

/// Slots that a layer's store holds after a step.
fn slots(shape: &ModelShape, plan: &Plan, standing: Standing, layer: usize) -> usize {
    let Standing { after, recent, .. } = standing;
    if let Some(window) = shape.windows[layer] {
        return whole(after.min(window.get() + PIECE + recent));
    }
    let top = rebuilt(shape, plan)
        .rev()
        .take(standing.whole)
        .any(|whole| whole == layer);
    if !plan.rebuilds(layer) || top {
        return whole(after);
    }
    let limit = plan.limit(standing.certified);
    whole(after).min(limit)
}

/// So many slots are whole pieces.
const fn whole(slots: usize) -> usize {
    slots.next_multiple_of(PIECE)
}

/// Bytes of what a batch holds.
struct Bytes {
    rows: usize,
    slot: usize,
    residual: usize,
}

impl Bytes {
    fn new(shape: &ModelShape, rows: usize) -> Self {
        let element = shape.dtype.size();
        Self {
            rows,
            // Its row, and the position it holds.
            slot: 2 * shape.kv_width() * element + size_of::<usize>(),
            residual: shape.hidden * element,
        }
    }

    const fn slots(&self, slots: usize) -> usize {
        self.rows * slots * self.slot
    }

    const fn residuals(&self, tokens: usize) -> usize {
        self.rows * tokens * self.residual
    }
}
