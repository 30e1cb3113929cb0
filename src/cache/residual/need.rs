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
    /// Top layers, of those that the plan rebuilds, that hold every row all the same.
    pub(super) whole: usize,
    /// Whether rows have to be rebuilt: old ones, and after parking all of them.
    pub(super) missing: bool,
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
        let Standing { before, after, .. } = standing;
        let layers =
            (0..shape.layers()).map(|layer| bytes.slots(slots(shape, plan, standing, layer)));
        let residuals = (0..shape.layers()).filter(|&layer| plan.old(layer) == Old::Residual);
        let ids = usize::from(plan.keeps_ids()) * size_of::<u32>() * whole(after);
        let between = layers.clone().sum::<usize>()
            + residuals.count() * bytes.residuals(after.next_multiple_of(plan.chunk()))
            + standing.rows * ids
            + bytes.slots(standing.differing);

        // A layer's buffers beside the larger or smaller ones that take their place.
        let moving = layers.max().unwrap_or(0) + bytes.slots(standing.differing);
        let rebuilt = rebuilt(shape, plan).count();
        let limited = rebuilt > standing.whole;
        let answer = if limited {
            bytes.slots(whole(after))
        } else {
            0
        };
        let replayed = standing.missing || limited && after > plan.hot();
        let scratch = if replayed {
            let chunk = plan.chunk();
            let carried = if standing.certified { after } else { before };
            let carried = bytes.residuals(carried.next_multiple_of(chunk));
            let projection =
                standing.rows * chunk * (shape.hidden + 4 * shape.kv_width()) * bytes.element;
            let block = |slots| {
                shape
                    .block_scratch(standing.rows, chunk, slots)
                    .max(projection)
            };
            let hot = bytes.slots(whole(after).min(plan.limit(true)));
            let reach = passed(shape, plan).map(|window| {
                let slots = whole(after.min(window + PIECE + chunk));
                // Two of them while one takes the place of the other.
                2 * bytes.slots(slots) + block(slots)
            });
            let each = reach.chain([moving, hot + block(whole(after))]);
            answer + carried + each.max().unwrap_or(0)
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

/// Windows of the layers that a replay may pass through.
fn passed<'a>(shape: &'a ModelShape, plan: &'a Plan) -> impl Iterator<Item = usize> + 'a {
    let flow = plan.flow(|layer| plan.rebuilds(layer) || shape.slides(layer));
    let layers = shape
        .windows
        .iter()
        .zip(flow)
        .filter(|(_, flow)| flow.enters);
    layers.filter_map(|(window, _)| window.map(|window| window.get()))
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
    element: usize,
    slot: usize,
    residual: usize,
}

impl Bytes {
    fn new(shape: &ModelShape, rows: usize) -> Self {
        let element = shape.dtype.size();
        Self {
            rows,
            element,
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
