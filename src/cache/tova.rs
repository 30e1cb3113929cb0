//! `Tova`: drops what the newest query looks at least (Oren et al., arXiv 2401.06104, section 4).

use crate::{
    cache::{
        Budget, CacheError, Entry, Group, ModelShape, Observation, State,
        evicting::{Evicting, Policy, Seen, Turn},
        forward::backend,
        keep::{by_layer_and_row, forget, select, weakest},
        layered::Layered,
        rows::Rows,
    },
    memory::MemoryReport,
};

/// Keeps, in every layer that shows all keys, the rows to which the newest query gave most, by the mean
/// over all query heads: one set for all heads of a layer, at original positions.
///
/// As in the paper the newest row is not protected, unless
/// [`with_protected_last`](TovaConfig::with_protected_last) says so. Of equal probabilities the lowest
/// position stays. A step sees the rows held and its own; a prompt longer than the budget is cut to it by
/// its last query alone. Once something was dropped the result depends on how tokens were split
/// into calls, and a truncation is refused with [`Irreversible`](CacheError::Irreversible), except
/// to nothing. Until then the bits are those of [`FullKv`](crate::cache::FullKv).
///
/// # Cost
/// `budget` rows, in whole pieces of 512 slots that also hold the rows of the step. A step beyond the
/// budget reads the newest query's probabilities back, `heads` numbers a slot in every layer; one below
/// it costs nothing, unless the budget is a share of a prompt of which more chunks follow: then the newest
/// query of each row is read back and held until its prompt ends.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::cache::{Budget, ModelShape, Tova, TovaConfig};
/// use kv_direct::exact::conformance::KernelShapes;
///
/// let shape = ModelShape::new(2, 64, DType::F32, KernelShapes::new(4, 2, 16));
/// let cache = Tova::new(&shape, TovaConfig::new(Budget::of_prompt(0.5)?).with_protected_last(true))?;
/// assert!(Tova::new(&shape, TovaConfig::new(0)).is_err());
/// # let _ = cache;
/// # Ok::<(), kv_direct::cache::CacheError>(())
/// ```
#[derive(Debug)]
pub struct Tova(Evicting<NewestQuery>);

/// How a [`Tova`] is built.
#[derive(Debug, Clone)]
pub struct TovaConfig {
    budget: Budget,
    protect_last: bool,
}

impl TovaConfig {
    /// `budget` rows, the newest not protected.
    #[must_use]
    pub fn new(budget: impl Into<Budget>) -> Self {
        Self {
            budget: budget.into(),
            protect_last: false,
        }
    }

    /// Whether the newest row is always kept.
    #[must_use]
    pub const fn with_protected_last(mut self, protected: bool) -> Self {
        self.protect_last = protected;
        self
    }
}

impl Tova {
    /// An empty cache for a model of this shape.
    ///
    /// # Errors
    /// [`Budget`](CacheError::Budget) if the budget is no row.
    pub fn new(shape: &ModelShape, config: TovaConfig) -> Result<Self, CacheError> {
        config.budget.holds(1)?;
        let newest = vec![Vec::new(); shape.layers()];
        Ok(Self(Evicting::new(shape, NewestQuery { config, newest })))
    }
}

backend!(Tova);

/// The entry of a state for a layer and batch row.
fn name(layer: usize, row: usize) -> String {
    format!("layer.{layer}.newest.{row}")
}

#[derive(Debug, Clone)]
struct NewestQuery {
    config: TovaConfig,
    /// By layer and batch row: what its newest query gave to every slot, the mean over the heads. Held
    /// while more chunks of a prompt follow that decides the budget: its last may pass a row by.
    newest: Vec<Vec<Vec<f32>>>,
}

impl Policy for NewestQuery {
    const NAME: &'static str = "tova";

    fn options(&self) -> String {
        let TovaConfig {
            budget,
            protect_last,
        } = self.config;
        let protected = if protect_last { "" } else { "not " };
        format!("budget {budget}, the last row {protected}protected")
    }

    fn observes(&self) -> bool {
        true
    }

    fn wants(&self, turn: &Turn) -> Observation {
        let wanted = |row: usize| match self.config.budget.of(turn.prompts[row]) {
            Some(budget) => turn.after[row] > budget,
            None => turn.after[row] > turn.before[row],
        };
        if (0..turn.after.len()).any(wanted) {
            Observation::LastRows(1)
        } else {
            Observation::Nothing
        }
    }

    fn observe(&mut self, layer: usize, rows: &mut Rows, seen: &Seen<'_>, turn: &Turn) {
        let newest = &mut self.newest[layer];
        newest.resize(turn.after.len(), Vec::new());
        for (row, _, slots) in rows.lists_mut() {
            let scores = if turn.after[row] > turn.before[row] {
                let heads = (0..seen.heads).map(|head| seen.row(row, head, 0));
                Group::Mean.reduce(heads)
            } else {
                std::mem::take(&mut newest[row])
            };
            let Some(budget) = self.config.budget.of(turn.prompts[row]) else {
                newest[row] = scores;
                continue;
            };
            newest[row] = Vec::new();
            // No query of this row is known: the next one will say what goes.
            if scores.is_empty() {
                continue;
            }
            let excess = slots.used().saturating_sub(budget);
            let last = turn.after[row].saturating_sub(1);
            let candidate = |position| !(self.config.protect_last && position == last);
            for slot in weakest(slots.as_ref(), &scores, excess, candidate) {
                slots.free_slot(slot);
            }
        }
    }

    fn settle(&mut self, turn: &Turn) {
        turn.release(&mut self.newest);
    }

    fn truncate(&mut self, lengths: &[usize], to: &[usize]) {
        forget(&mut self.newest, lengths, to);
    }

    fn select_rows(&mut self, rows: &[usize]) {
        self.newest
            .iter_mut()
            .for_each(|newest| select(newest, rows));
    }

    fn write(&self, state: &mut State) {
        for (layer, newest) in self.newest.iter().enumerate() {
            for (row, scores) in newest.iter().enumerate().filter(|(_, s)| !s.is_empty()) {
                state.insert(name(layer, row), Entry::Floats(scores.clone()));
            }
        }
    }

    fn restored(&self, state: &State, held: &Layered) -> Result<Self, CacheError> {
        let (layers, rows) = (held.layers.len(), held.progress.lengths().len());
        let read = |layer, row| {
            let name = name(layer, row);
            let scores = state
                .contains(&name)
                .then(|| state.floats(&name))
                .transpose()?;
            Ok(scores.unwrap_or_default().to_vec())
        };
        Ok(Self {
            newest: by_layer_and_row(layers, rows, read)?,
            ..self.clone()
        })
    }

    fn report(&self, report: &mut MemoryReport) {
        let newest = self.newest.iter().flatten();
        report.scores += newest.map(|scores| size_of_val(&scores[..])).sum::<usize>();
    }

    fn clear(&mut self) {
        self.newest.iter_mut().for_each(Vec::clear);
    }
}
