//! `SnapKv`: cuts a prompt once, to what its last queries looked at (Li et al., arXiv 2404.14469,
//! section 4).

use std::ops::Range;

use crate::{
    cache::{
        Budget, CacheError, Entry, Group, ModelShape, Observation, State,
        evicting::{Evicting, Policy, Seen, Turn},
        forward::backend,
        keep::{by_layer_and_row, forget, pooled, select, weakest},
        layered::Layered,
        rows::Rows,
        state::wrong,
    },
    memory::MemoryReport,
};

/// Keeps, of a prompt, its last `window` rows and for each KV head those that the queries of this window
/// gave most; everything that comes after the prompt is kept.
///
/// The cut is made once, when the last chunk of the prompt was taken in
/// ([`Step::with_more_follows`](crate::cache::Step::with_more_follows)), and is the same for every
/// chunking; the prompt itself is attended in full. A score is the probability that the window's queries
/// gave a row, pooled over its neighbours and then reduced over the query heads that share a KV head. Of
/// equal scores, which maximum pooling makes the rule, the lowest position stays. Rows keep their original
/// positions. Later turns of a conversation are not cut: rows held are the budget and all that came
/// after the first prompt. A prompt no longer than the budget is kept whole, and the window even where a
/// share of a short prompt leaves no room for it.
///
/// What came after the prompt can be taken back; further back is refused with
/// [`Irreversible`](CacheError::Irreversible) once the prompt was cut, and so is any truncation while
/// more chunks of it follow. A prompt that is taken back in part is over: what comes next is kept.
///
/// # Cost
/// The whole prompt until it ends, then the budget and what follows. The last chunk reads back `heads ·
/// window` numbers a slot in every layer. Where more chunks follow, these are kept as well, in f32.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::cache::{ModelShape, Pooling, SnapKv, SnapKvConfig};
/// use kv_direct::exact::conformance::KernelShapes;
///
/// let shape = ModelShape::new(2, 64, DType::F32, KernelShapes::new(4, 2, 16));
/// let cache = SnapKv::new(&shape, SnapKvConfig::new(256, 32).with_pooling(Pooling::Max, 7))?;
/// assert!(SnapKv::new(&shape, SnapKvConfig::new(32, 32)).is_err(), "no row beside the window");
/// # let _ = cache;
/// # Ok::<(), kv_direct::cache::CacheError>(())
/// ```
#[derive(Debug)]
pub struct SnapKv(Evicting<PromptWindow>);

/// How scores of neighbours become one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pooling {
    /// Their average, zeros counted beyond the ends: the default of the authors' code.
    #[default]
    Average,
    /// The largest.
    Max,
}

/// How a [`SnapKv`] is built.
#[derive(Debug, Clone)]
pub struct SnapKvConfig {
    budget: Budget,
    window: usize,
    kernel: usize,
    pooling: Pooling,
    group: Group,
}

impl SnapKvConfig {
    /// `budget` rows of a prompt, its last `window` among them; averages over 5 neighbours.
    #[must_use]
    pub fn new(budget: impl Into<Budget>, window: usize) -> Self {
        Self {
            budget: budget.into(),
            window,
            kernel: 5,
            pooling: Pooling::default(),
            group: Group::default(),
        }
    }

    /// How scores are pooled, over how many neighbours; an odd number, 1 for none.
    #[must_use]
    pub const fn with_pooling(mut self, pooling: Pooling, kernel: usize) -> Self {
        (self.pooling, self.kernel) = (pooling, kernel);
        self
    }

    /// How the scores of the query heads that share a KV head become one.
    #[must_use]
    pub const fn with_group(mut self, group: Group) -> Self {
        self.group = group;
        self
    }
}

impl SnapKv {
    /// An empty cache for a model of this shape.
    ///
    /// # Errors
    /// [`Budget`](CacheError::Budget) unless the budget is larger than the window,
    /// [`Kernel`](CacheError::Kernel) for a kernel that is even,
    /// [`SnapWindow`](CacheError::SnapWindow) for a window of no rows.
    pub fn new(shape: &ModelShape, config: SnapKvConfig) -> Result<Self, CacheError> {
        if config.window == 0 {
            return Err(CacheError::SnapWindow);
        }
        if config.kernel.is_multiple_of(2) {
            return Err(CacheError::Kernel {
                found: config.kernel,
            });
        }
        config.budget.holds(config.window.saturating_add(1))?;
        let layers = vec![Vec::new(); shape.layers()];
        Ok(Self(Evicting::new(shape, PromptWindow { config, layers })))
    }
}

backend!(SnapKv);

#[derive(Debug, Clone)]
struct PromptWindow {
    config: SnapKvConfig,
    /// By layer and batch row: what the last queries so far gave to every slot, for each head. Held
    /// while more chunks of a prompt follow.
    layers: Vec<Vec<Vec<Row>>>,
}

/// What one query gave: for every head, to every slot up to its own.
type Row = Vec<Vec<f32>>;

impl PromptWindow {
    /// A score for every slot of a prompt, the window left out, from what its queries gave by some heads.
    fn scores(&self, rows: &[Row], heads: Range<usize>, prompt: usize) -> Vec<f32> {
        let before = prompt - self.config.window.min(prompt);
        let by_head: Vec<Vec<f32>> = heads
            .map(|head| {
                let mut sum = vec![0.0; before];
                for row in rows {
                    sum.iter_mut()
                        .zip(&row[head])
                        .for_each(|(sum, more)| *sum += more);
                }
                pooled(
                    &sum,
                    self.config.kernel,
                    self.config.pooling == Pooling::Average,
                )
            })
            .collect();
        self.config.group.reduce(by_head.iter().map(Vec::as_slice))
    }
}

/// The entry of a state for a layer and batch row.
fn name(layer: usize, row: usize, part: &str) -> String {
    format!("layer.{layer}.{part}.{row}")
}

impl Policy for PromptWindow {
    const NAME: &'static str = "snap_kv";
    const PER_HEAD: bool = true;

    fn options(&self) -> String {
        let SnapKvConfig {
            budget,
            window,
            kernel,
            pooling,
            group,
        } = &self.config;
        let pooling = match pooling {
            Pooling::Average => "average",
            Pooling::Max => "maximum",
        };
        format!(
            "budget {budget}, window {window}, {pooling} over {kernel} neighbours, {group} of a group"
        )
    }

    fn observes(&self) -> bool {
        true
    }

    fn wants(&self, turn: &Turn) -> Observation {
        let wanted = |row: usize| match turn.prompts[row] {
            None => turn.after[row] > 0,
            Some(prompt) => {
                turn.ends_prompt[row]
                    && self
                        .config
                        .budget
                        .of(Some(prompt))
                        .is_some_and(|b| prompt > b)
            }
        };
        if !(0..turn.after.len()).any(wanted) {
            return Observation::Nothing;
        }
        // What a draft brought after a prompt.
        let ended = (0..turn.after.len()).filter(|&row| turn.ends_prompt[row]);
        let behind = ended.map(|row| turn.after[row] - turn.prompts[row].unwrap_or(0));
        let behind = behind.max().unwrap_or(0);
        Observation::LastRows(self.config.window.saturating_add(behind))
    }

    fn observe(&mut self, layer: usize, rows: &mut Rows, seen: &Seen<'_>, turn: &Turn) {
        let window = self.config.window;
        let mut kept = std::mem::take(&mut self.layers[layer]);
        kept.resize(turn.after.len(), Vec::new());
        for (row, kept) in kept.iter_mut().enumerate() {
            let over = turn.prompts[row];
            if over.is_some_and(|_| !turn.ends_prompt[row]) {
                continue;
            }
            // What a draft brought after the prompt does not vote.
            let (before, length) = (turn.before[row], over.unwrap_or(turn.after[row]));
            let end = seen.queries - (turn.after[row] - length).min(seen.queries);
            let new = length.saturating_sub(before).min(window).min(end);
            kept.extend((end - new..end).map(|query| {
                let heads = 0..seen.heads;
                heads
                    .map(|head| seen.row(row, head, query)[..length].to_vec())
                    .collect()
            }));
            kept.drain(..kept.len().saturating_sub(window));
        }
        for (row, head, slots) in rows.lists_mut() {
            let Some(prompt) = turn.prompts[row].filter(|_| turn.ends_prompt[row]) else {
                continue;
            };
            let budget = self.config.budget.of(Some(prompt)).unwrap_or(prompt);
            if prompt <= budget {
                continue;
            }
            let scores = self.scores(&kept[row], seen.of_group(head), prompt);
            let candidate = |position| position < prompt.saturating_sub(window);
            for slot in weakest(slots.as_ref(), &scores, prompt - budget, candidate) {
                slots.free_slot(slot);
            }
        }
        self.layers[layer] = kept;
    }

    fn settle(&mut self, turn: &Turn) {
        turn.release(&mut self.layers);
    }

    fn truncate(&mut self, lengths: &[usize], to: &[usize]) {
        forget(&mut self.layers, lengths, to);
    }

    fn select_rows(&mut self, rows: &[usize]) {
        self.layers.iter_mut().for_each(|kept| select(kept, rows));
    }

    fn write(&self, state: &mut State) {
        for (layer, kept) in self.layers.iter().enumerate() {
            for (row, queries) in kept.iter().enumerate().filter(|(_, q)| !q.is_empty()) {
                let lengths = queries
                    .iter()
                    .map(|heads| heads.first().map_or(0, Vec::len));
                state.insert_positions(&name(layer, row, "lengths"), lengths);
                let seen = queries.iter().flatten().flatten().copied().collect();
                state.insert(name(layer, row, "queries"), Entry::Floats(seen));
            }
        }
    }

    fn restored(&self, state: &State, held: &Layered) -> Result<Self, CacheError> {
        let heads = held.shape.kernels.heads;
        let longest = held.progress.lengths();
        let read = |layer, row: usize| {
            let queries = name(layer, row, "queries");
            if !state.contains(&queries) {
                return Ok(Vec::new());
            }
            let mut seen = state.floats(&queries)?;
            let lengths = state.positions(&name(layer, row, "lengths"))?;
            let fits = |&length: &usize| 0 < length && length <= longest[row];
            let total = lengths
                .iter()
                .filter(|length| fits(length))
                .map(|n| n * heads)
                .sum::<usize>();
            if lengths.len() > self.config.window
                || !lengths.iter().all(fits)
                || total != seen.len()
            {
                return Err(wrong(&queries, "it does not fit the lengths"));
            }
            let mut kept: Vec<Row> = Vec::new();
            for length in lengths {
                let (query, rest) = seen.split_at(length * heads);
                kept.push(query.chunks_exact(length).map(<[f32]>::to_vec).collect());
                seen = rest;
            }
            Ok(kept)
        };
        let prompts = state.positions("prompts")?;
        let open = |row: &usize| prompts.get(*row) == Some(&usize::MAX);
        let full = || held.layers.iter().filter(|rows| !rows.slides());
        let whole = |row: usize| full().all(|rows| rows.starts_with(row, longest[row]));
        if (0..longest.len())
            .filter(open)
            .any(|row| longest[row] > 0 && !whole(row))
        {
            return Err(wrong("prompts", "one is open, but rows of it are missing"));
        }
        Ok(Self {
            config: self.config.clone(),
            layers: by_layer_and_row(self.layers.len(), longest.len(), read)?,
        })
    }

    fn oldest(&self, length: usize, prompt: Option<usize>, dropped: bool) -> usize {
        match prompt {
            // What the queries before the last ones saw is gone, and the cut is made by the last.
            None => length,
            Some(prompt) if dropped => prompt,
            Some(_) => 0,
        }
    }

    fn report(&self, report: &mut MemoryReport) {
        let heads = self.layers.iter().flatten().flatten().flatten();
        report.scores += heads.map(|scores| size_of_val(&scores[..])).sum::<usize>();
    }

    fn clear(&mut self) {
        self.layers.iter_mut().for_each(Vec::clear);
    }
}
