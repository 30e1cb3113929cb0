//! What backends that drop rows share: storage, progress, and when a policy is asked.
//!
//! A policy sees the layers that show all keys and no others, and drops rows after the attention of a
//! step: once a layer's attention was observed, or when the step is committed; after those of a draft once
//! it is accepted.

mod draft;
mod policy;
mod seen;
mod stored;
mod turn;

use crate::{
    cache::{
        CacheBackend, CacheError, Kept, KeysValues, LayerIndex, ModelShape, Observation, Observed,
        Span, State, Step, layered::Layered, rows::Rows,
    },
    memory::MemoryReport,
};
use draft::Draft;
pub(crate) use policy::Policy;
pub(crate) use seen::Seen;
pub(crate) use turn::Turn;

/// A backend that drops rows as `policy` says.
#[derive(Debug, Clone)]
pub(crate) struct Evicting<P> {
    held: Layered,
    policy: P,
    /// The open step, or the last one: prompts that are over stay over. Within a draft it begins with that.
    turn: Turn,
    draft: Option<Draft>,
}

impl<P: Policy> Evicting<P> {
    pub(crate) fn new(shape: &ModelShape, policy: P) -> Self {
        Self {
            held: Layered::new(shape, P::PER_HEAD),
            policy,
            turn: Turn::default(),
            draft: None,
        }
    }

    fn wants_at(&self, layer: usize) -> Observation {
        if self.held.shape.slides(layer) {
            return Observation::Nothing;
        }
        match &self.draft {
            None => self.policy.wants(&self.turn),
            Some(draft) => draft.wants(&self.policy, &self.turn),
        }
    }

    /// Drops what the policy declines by position.
    fn retain(&mut self) {
        let (policy, turn) = (&self.policy, &self.turn);
        if P::BY_POSITION {
            self.held
                .retain(|row, position| policy.stays(position, turn.after[row], turn.prompts[row]));
        }
    }

    /// Lets the policy drop rows of a layer by what attention saw.
    fn evict(&mut self, layer: usize, seen: &Seen<'_>) {
        // What was seen, as attention handed it over and on the host, and what a policy copies of it.
        let mut report = MemoryReport::default();
        self.policy.report(&mut report);
        let beside = 3 * size_of_val(seen.values) + report.total();
        let (policy, turn) = (&mut self.policy, &self.turn);
        self.held.evict(layer, beside, |rows| {
            policy.observe(layer, rows, seen, turn);
        });
    }
}

impl<P: Policy> CacheBackend for Evicting<P> {
    fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
        self.held.begin(step)?;
        self.turn.prompts.resize(step.starts().len(), None);
        let after = self.held.progress.lengths_after();
        let rows = self.turn.prompts.iter().zip(&after);
        let (mut ends_prompt, prompts): (Vec<_>, Vec<_>) = rows
            .map(|(known, &length)| {
                let ends = known.is_none() && !step.more_follows() && length > 0;
                (ends, if ends { Some(length) } else { *known })
            })
            .unzip();
        if let Some(draft) = &self.draft {
            ends_prompt = draft.ended(&prompts);
        }
        self.turn = Turn {
            before: self.held.progress.verified(),
            after,
            prompts,
            ends_prompt,
        };
        Ok(())
    }

    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        self.held.store(layer, &span)?;
        let layer = layer.index();
        let rows = &mut self.held.layers[layer];
        if rows.slides() {
            return rows.read();
        }
        let answer = self.policy.read(layer, rows, &span, &self.turn);
        if answer.is_err() {
            self.held.progress.fail();
        }
        answer
    }

    fn wants(&self, layer: LayerIndex, _: &Step) -> Observation {
        self.wants_at(layer.index())
    }

    fn observe(&mut self, layer: LayerIndex, seen: Observed) -> Result<(), CacheError> {
        self.held.progress.observing(layer)?;
        let layer = layer.index();
        if self.wants_at(layer) == Observation::Nothing {
            return Ok(());
        }
        let (batch, heads) = (self.turn.after.len(), self.held.shape.kernels.heads);
        let slots = self.held.layers.get(layer).map_or(0, Rows::capacity);
        let (wanted, found, values) = match seen {
            Observed::ColumnSums(sums) => (
                vec![batch, heads, slots],
                sums.dims().to_vec(),
                sums.try_into_vec_as(),
            ),
            Observed::LastRows(rows) => {
                let Observation::LastRows(last) = self.wants_at(layer) else {
                    return Ok(());
                };
                let last = last.min(self.held.progress.widest());
                (
                    vec![batch, heads, last, slots],
                    rows.dims().to_vec(),
                    rows.try_into_vec_as(),
                )
            }
        };
        if wanted != found {
            self.held.progress.fail();
            return Err(CacheError::Shape {
                what: "observed probabilities",
                expected: wanted,
                found,
            });
        }
        let values: Vec<f32> = values.map_err(|error| {
            self.held.progress.fail();
            CacheError::Backend(Box::new(error))
        })?;
        let queries = if found.len() == 4 { found[2] } else { 1 };
        let seen = Seen {
            values: &values,
            heads,
            kv_heads: self.held.shape.kernels.kv_heads,
            queries,
            slots,
        };
        match &mut self.draft {
            Some(draft) => {
                let adding = self.held.progress.adding();
                draft.keep(layer, &seen, &adding, &self.turn.after);
                self.held.hold(draft.bytes() + 2 * size_of_val(&values[..]));
            }
            None => self.evict(layer, &seen),
        }
        Ok(())
    }

    fn commit(&mut self) -> Result<(), CacheError> {
        self.held.progress.commit(&self.held.shape)?;
        if self.draft.is_none() {
            self.policy.settle(&self.turn);
            self.retain();
        }
        Ok(())
    }

    fn position(&self, row: usize) -> usize {
        self.held.progress.length(row)
    }

    fn kept(&self, layer: LayerIndex) -> Kept {
        self.held.kept(layer)
    }

    fn memory(&self) -> MemoryReport {
        let mut report = self.held.memory();
        self.policy.report(&mut report);
        report.scores += self.draft.as_ref().map_or(0, Draft::bytes);
        report
    }

    fn rows(&self) -> usize {
        self.held.progress.lengths().len()
    }

    fn truncate_rows(&mut self, to: &[usize]) -> Result<(), CacheError> {
        let full = self.held.layers.iter().find(|rows| !rows.slides());
        let oldest = |row: usize, length: usize| {
            let dropped = full.is_some_and(|rows| rows.used(row) < length);
            let prompt = self.turn.prompts.get(row).copied().flatten();
            self.policy.oldest(length, prompt, dropped)
        };
        self.held.can_truncate(to, oldest)?;
        if to.iter().all(|&to| to == 0) {
            self.clear();
            return Ok(());
        }
        match &mut self.draft {
            Some(draft) => draft.truncate(to),
            None => self.policy.truncate(self.held.progress.lengths(), to),
        }
        self.turn.shorten(to);
        if let Some(draft) = &self.draft {
            let (before, now) = (self.held.progress.verified(), self.held.progress.lengths());
            let nothing_left = |row: usize| to[row] == before[row] && to[row] < now[row];
            draft.reopen(&mut self.turn.prompts, nothing_left);
        }
        self.held.truncate(to);
        Ok(())
    }

    fn checkpoint(&mut self) -> Result<(), CacheError> {
        self.held.progress.checkpoint()?;
        self.draft = Some(Draft::new(&self.turn.prompts, self.held.layers.len()));
        Ok(())
    }

    fn restore(&mut self) -> Result<(), CacheError> {
        let to = self.held.progress.drafted()?;
        if !self.held.progress.has_batch_before_draft() {
            self.clear();
            return Ok(());
        }
        self.held.progress.end_draft();
        self.held.truncate(&to);
        if let Some(draft) = self.draft.take() {
            self.turn.prompts = draft.into_prompts();
        }
        Ok(())
    }

    fn accept(&mut self) -> Result<(), CacheError> {
        let before = self.held.progress.drafted()?;
        self.held.progress.end_draft();
        let Some(draft) = self.draft.take() else {
            return Ok(());
        };
        let after = self.held.progress.lengths().to_vec();
        if before == after {
            self.turn.prompts = draft.into_prompts();
            self.held.settle();
            return Ok(());
        }
        let ends_prompt = draft.ended(&self.turn.prompts);
        self.turn = Turn {
            before,
            after,
            ends_prompt,
            prompts: std::mem::take(&mut self.turn.prompts),
        };
        for layer in 0..self.held.layers.len() {
            let wanted = self.wants_at(layer);
            let slots = self.held.layers[layer].capacity();
            let kernels = &self.held.shape.kernels;
            let (heads, kv_heads) = (kernels.heads, kernels.kv_heads);
            if let Some((queries, values)) = draft.merged(layer, wanted, heads, slots) {
                let seen = Seen {
                    values: &values,
                    heads,
                    kv_heads,
                    queries,
                    slots,
                };
                self.held.hold(draft.bytes());
                self.evict(layer, &seen);
            }
        }
        self.policy.settle(&self.turn);
        self.retain();
        self.held.settle();
        Ok(())
    }

    fn select_rows(&mut self, rows: &[usize]) -> Result<(), CacheError> {
        self.held.progress.can_select_rows(rows)?;
        if rows.is_empty() {
            self.clear();
        } else if !rows.iter().copied().eq(0..self.rows()) {
            self.policy.select_rows(rows);
            self.turn.select_rows(rows);
            self.held.select_rows(rows);
        }
        Ok(())
    }

    fn state(&self) -> Result<State, CacheError> {
        self.held.progress.undrafted()?;
        Ok(self.written())
    }

    fn set_state(&mut self, state: &State) -> Result<(), CacheError> {
        *self = self.restored(state)?;
        Ok(())
    }

    fn clear(&mut self) {
        self.held.clear();
        self.policy.clear();
        self.turn = Turn::default();
        self.draft = None;
    }

    fn fork(&self) -> Box<dyn CacheBackend> {
        Box::new(self.clone())
    }
}
