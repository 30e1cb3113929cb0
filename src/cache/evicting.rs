//! What backends that drop rows share: storage, progress, and when a policy is asked.
//!
//! A policy sees the layers that show all keys and no others, and drops rows after the attention of a
//! step: once a layer's attention was observed, or when the step is committed.

use std::{fmt, ops::Range};

use crate::{
    cache::{
        CacheBackend, CacheError, Group, Kept, KeysValues, LayerIndex, ModelShape, Observation,
        Observed, Span, Step, layered::Layered, rows::Rows,
    },
    memory::MemoryReport,
};

/// What sets one such backend apart.
pub(crate) trait Policy: fmt::Debug + Clone + Send + 'static {
    /// Whether KV heads may hold different rows.
    const PER_HEAD: bool = false;
    /// Whether [`stays`](Self::stays) ever declines.
    const BY_POSITION: bool = false;

    /// What attention must hand back at a layer.
    fn wants(&self, turn: &Turn) -> Observation {
        let _ = turn;
        Observation::Nothing
    }

    /// Drops rows of a layer by what its attention saw: `seen` has one number for every batch row,
    /// head, query and slot, in this order.
    fn observe(&mut self, layer: usize, rows: &mut Rows, seen: &Seen<'_>, turn: &Turn) {
        let _ = (layer, rows, seen, turn);
    }

    /// All rows of a layer, those of the step included, as attention is to read them.
    fn read(
        &mut self,
        layer: usize,
        rows: &mut Rows,
        span: &Span<'_>,
        turn: &Turn,
    ) -> Result<KeysValues, CacheError> {
        let _ = (layer, span, turn);
        rows.read()
    }

    /// Whether a batch row of `length` tokens keeps a position once its step is over; `prompt` is the
    /// length of its prompt, where that is over.
    fn stays(&self, position: usize, length: usize, prompt: Option<usize>) -> bool {
        let _ = (position, length, prompt);
        true
    }

    /// The shortest length, apart from 0, to which a batch row of `length` tokens can be taken back.
    fn oldest(&self, length: usize, prompt: Option<usize>, dropped: bool) -> usize {
        let _ = prompt;
        if dropped { length } else { 0 }
    }

    /// Forgets what the policy itself holds of the tokens from `to` on; `lengths` are those before.
    fn truncate(&mut self, lengths: &[usize], to: usize) {
        let _ = (lengths, to);
    }

    /// The step is over: what the policy itself holds for an end that has come may go.
    fn settle(&mut self, turn: &Turn) {
        let _ = turn;
    }

    /// Adds the bytes of what the policy itself holds.
    fn report(&self, report: &mut MemoryReport) {
        let _ = report;
    }

    /// Forgets what the policy itself holds of all sequences.
    fn clear(&mut self) {}
}

/// The step a policy is asked about.
#[derive(Debug, Clone, Default)]
pub(crate) struct Turn {
    /// Tokens of every batch row before the step, and after it.
    pub(crate) before: Vec<usize>,
    pub(crate) after: Vec<usize>,
    /// The length of every batch row's prompt; none while more chunks of it follow.
    pub(crate) prompts: Vec<Option<usize>>,
    /// Whether the prompt of a batch row ends with this step: once, whatever steps pass the row by.
    pub(crate) ends_prompt: Vec<bool>,
}

impl Turn {
    /// Lets go of what is held, by layer and batch row, for prompts that are over.
    pub(crate) fn release<T>(&self, held: &mut [Vec<Vec<T>>]) {
        for layer in held {
            for (held, prompt) in layer.iter_mut().zip(&self.prompts) {
                if prompt.is_some() {
                    *held = Vec::new();
                }
            }
        }
    }
}

/// What attention saw, on the host.
pub(crate) struct Seen<'a> {
    pub(crate) values: &'a [f32],
    /// Query heads, and queries and slots of each.
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) queries: usize,
    pub(crate) slots: usize,
}

impl Seen<'_> {
    /// What one query of one head gave to every slot.
    pub(crate) fn row(&self, row: usize, head: usize, query: usize) -> &[f32] {
        let from = ((row * self.heads + head) * self.queries + query) * self.slots;
        &self.values[from..from + self.slots]
    }

    /// The query heads that share a KV head.
    pub(crate) fn of_group(&self, kv_head: usize) -> Range<usize> {
        let group = self.heads / self.kv_heads;
        kv_head * group..(kv_head + 1) * group
    }

    /// What one query of all heads that share a KV head gave to every slot, as one.
    pub(crate) fn group(&self, row: usize, kv_head: usize, query: usize, by: Group) -> Vec<f32> {
        let heads = self.of_group(kv_head);
        by.reduce(heads.map(|head| self.row(row, head, query)))
    }
}

/// A backend that drops rows as `policy` says.
#[derive(Debug, Clone)]
pub(crate) struct Evicting<P> {
    held: Layered,
    policy: P,
    /// The open step, or the last one: prompts that are over stay over.
    turn: Turn,
}

impl<P: Policy> Evicting<P> {
    pub(crate) fn new(shape: &ModelShape, policy: P) -> Self {
        Self {
            held: Layered::new(shape, P::PER_HEAD),
            policy,
            turn: Turn::default(),
        }
    }

    fn wants_at(&self, layer: usize) -> Observation {
        if self.held.shape.slides(layer) {
            Observation::Nothing
        } else {
            self.policy.wants(&self.turn)
        }
    }
}

impl<P: Policy> CacheBackend for Evicting<P> {
    fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
        self.held.begin(step)?;
        self.turn.prompts.resize(step.starts().len(), None);
        let after = self.held.progress.lengths_after();
        let rows = self.turn.prompts.iter().zip(&after);
        let (ends_prompt, prompts) = rows
            .map(|(known, &length)| {
                let ends = known.is_none() && !step.more_follows() && length > 0;
                (ends, if ends { Some(length) } else { *known })
            })
            .unzip();
        self.turn = Turn {
            before: self.held.progress.lengths().to_vec(),
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
                let longest = self
                    .turn
                    .after
                    .iter()
                    .zip(&self.turn.before)
                    .map(|(a, b)| a - b)
                    .max();
                let last = last.min(longest.unwrap_or(0));
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
        // What was seen, as attention handed it over and on the host, and what a policy copies of it.
        let mut report = MemoryReport::default();
        self.policy.report(&mut report);
        let beside = 3 * size_of_val(&values[..]) + report.total();
        let (policy, turn) = (&mut self.policy, &self.turn);
        self.held.evict(layer, beside, |rows| {
            policy.observe(layer, rows, &seen, turn);
        });
        Ok(())
    }

    fn commit(&mut self) -> Result<(), CacheError> {
        self.held.progress.commit(&self.held.shape)?;
        self.policy.settle(&self.turn);
        let (policy, turn) = (&self.policy, &self.turn);
        if P::BY_POSITION {
            self.held
                .retain(|row, position| policy.stays(position, turn.after[row], turn.prompts[row]));
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
        report
    }

    fn truncate(&mut self, to: usize) -> Result<(), CacheError> {
        let full = self.held.layers.iter().find(|rows| !rows.slides());
        let oldest = |row: usize, length: usize| {
            let dropped = full.is_some_and(|rows| rows.used(row) < length);
            let prompt = self.turn.prompts.get(row).copied().flatten();
            self.policy.oldest(length, prompt, dropped)
        };
        self.held.can_truncate(to, oldest)?;
        if to == 0 {
            self.clear();
            return Ok(());
        }
        self.policy.truncate(self.held.progress.lengths(), to);
        self.held.truncate(to);
        // A prompt that is taken back in part is over.
        for prompt in self.turn.prompts.iter_mut().flatten() {
            *prompt = to.min(*prompt);
        }
        Ok(())
    }

    fn clear(&mut self) {
        self.held.clear();
        self.policy.clear();
        self.turn = Turn::default();
    }

    fn fork(&self) -> Box<dyn CacheBackend> {
        Box::new(self.clone())
    }
}
