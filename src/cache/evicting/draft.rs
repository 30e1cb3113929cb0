//! What a policy will want to know once a draft is accepted: the prompts when it began, and what each of
//! its queries saw.

use super::{Policy, Seen, Turn};
use crate::cache::Observation;

#[derive(Debug, Clone)]
pub(super) struct Draft {
    /// The length of every batch row's prompt when the draft began.
    prompts: Vec<Option<usize>>,
    /// By layer and batch row, those that were asked for.
    queries: Vec<Vec<Vec<Query>>>,
}

/// What a query of the draft gave to every slot, head after head.
#[derive(Debug, Clone)]
struct Query {
    position: usize,
    seen: Vec<f32>,
}

impl Draft {
    pub(super) fn new(prompts: &[Option<usize>], layers: usize) -> Self {
        Self {
            prompts: prompts.to_vec(),
            queries: vec![Vec::new(); layers],
        }
    }

    /// What attention must hand back: all of what a policy may ask about later, if it may.
    pub(super) fn wants(&self, policy: &impl Policy, turn: &Turn) -> Observation {
        let open = |row: usize| self.prompts.get(row).copied().flatten().is_none();
        let unknown = policy.observes() && (0..turn.after.len()).any(open);
        match policy.wants(turn) {
            Observation::Nothing if !unknown => Observation::Nothing,
            _ => Observation::LastRows(usize::MAX),
        }
    }

    /// Which prompts ended within the draft.
    pub(super) fn ended(&self, now: &[Option<usize>]) -> Vec<bool> {
        let open = |row: usize| self.prompts.get(row).copied().flatten().is_none();
        let rows = now.iter().enumerate();
        rows.map(|(row, prompt)| prompt.is_some() && open(row))
            .collect()
    }

    /// Keeps what the queries of a step saw: of every batch row the newest, as many as it brought, up to
    /// its length in `after`.
    pub(super) fn keep(&mut self, layer: usize, seen: &Seen<'_>, count: &[usize], after: &[usize]) {
        let held = &mut self.queries[layer];
        held.resize(count.len(), Vec::new());
        for (row, (held, &count)) in held.iter_mut().zip(count).enumerate() {
            for back in (1..=count.min(seen.queries)).rev() {
                let query = seen.queries - back;
                let heads = (0..seen.heads).flat_map(|head| seen.row(row, head, query));
                held.push(Query {
                    position: after[row] - back,
                    seen: heads.copied().collect(),
                });
            }
        }
    }

    /// Forgets what the queries from `to` on saw.
    pub(super) fn truncate(&mut self, to: &[usize]) {
        for layer in &mut self.queries {
            for (held, &to) in layer.iter_mut().zip(to) {
                held.retain(|query| query.position < to);
            }
        }
    }

    /// What the draft's queries saw of a layer, as attention hands it back when it is asked for `wanted`:
    /// how many queries, and one number for every batch row, head, query and slot.
    pub(super) fn merged(
        &self,
        layer: usize,
        wanted: Observation,
        heads: usize,
        slots: usize,
    ) -> Option<(usize, Vec<f32>)> {
        let held = &self.queries[layer];
        let longest = held.iter().map(Vec::len).max().unwrap_or(0);
        let queries = match wanted {
            Observation::Nothing => return None,
            Observation::ColumnSums => 1,
            Observation::LastRows(last) => last.min(longest),
        };
        if longest == 0 {
            return None;
        }
        let mut values = vec![0.0; held.len() * heads * queries * slots];
        for (row, held) in held.iter().enumerate() {
            let first = match wanted {
                Observation::LastRows(_) => held.len().saturating_sub(queries),
                _ => 0,
            };
            for (index, Query { seen: query, .. }) in held[first..].iter().enumerate() {
                let at = match wanted {
                    Observation::LastRows(_) => queries - (held.len() - first) + index,
                    _ => 0,
                };
                for (head, seen) in query.chunks_exact(query.len() / heads).enumerate() {
                    let from = ((row * heads + head) * queries + at) * slots;
                    let sums = &mut values[from..from + seen.len().min(slots)];
                    sums.iter_mut()
                        .zip(seen)
                        .for_each(|(sum, more)| *sum += more);
                }
            }
        }
        Some((queries, values))
    }

    /// A batch row of whose draft nothing is left has the prompt it had when that began.
    pub(super) fn reopen(&self, now: &mut [Option<usize>], nothing_left: impl Fn(usize) -> bool) {
        for (row, now) in now.iter_mut().enumerate() {
            if nothing_left(row) {
                *now = self.prompts.get(row).copied().flatten();
            }
        }
    }

    /// The prompts as they were when the draft began.
    pub(super) fn into_prompts(self) -> Vec<Option<usize>> {
        self.prompts
    }

    pub(super) fn bytes(&self) -> usize {
        let queries = self.queries.iter().flatten().flatten();
        let bytes = |query: &Query| query.seen.capacity() * size_of::<f32>();
        queries.map(bytes).sum()
    }
}
