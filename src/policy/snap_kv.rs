//! `SnapKv`: cuts a prompt once, to what its last queries attend to (Li et al., arXiv 2404.14469, section 4).

use super::{Attention, Entries, Evicting, Group, Policy, Sequence, TokenBudget, select::pooled};
use crate::cache::{CacheError, ModelShape, Observation, forward_to_field};

/// Keeps, of a prompt, its last `window` entries and, for each KV head, those to which the queries of this window gave
/// the highest probability. Everything after the prompt is kept.
///
/// The prompt is cut once, when its last chunk was processed
/// ([`Step::with_more_follows`](crate::cache::Step::with_more_follows)), and the cut is the same for every chunking.
/// The prompt itself is attended to in full. A score is the sum of the probabilities that the window's queries gave,
/// pooled over neighbours, then reduced over the query heads that share a KV head. Of equal scores the lowest position
/// stays; maximum pooling makes them common. Entries keep their original positions. Later prompts of a conversation are
/// not cut, so the entries held are the budget and all that came after the first prompt. A prompt within the budget is
/// kept whole. The window is kept even if a share of a short prompt is smaller.
///
/// What came after the prompt can be truncated. A truncation into a prompt that was cut is refused with
/// [`Irreversible`](CacheError::Irreversible), and so is any truncation while more chunks of it follow. A prompt that
/// lost tokens is over: what comes next is kept.
///
/// # Cost
/// The whole prompt until it ends, then the budget and what follows. The last chunk reads back `heads · window`
/// numbers a slot in every full-attention layer. While more chunks follow, these are remembered, in f32.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::policy::{Pooling, SnapKv, SnapKvConfig};
/// use kv_direct::{cache::ModelShape, exact::KernelShapes};
///
/// let shape = ModelShape::new(2, 64, DType::F32, KernelShapes::new(4, 2, 16));
/// assert!(SnapKv::new(&shape, SnapKvConfig::new(256, 32).with_pooling(Pooling::Max, 7)).is_ok());
/// assert!(SnapKv::new(&shape, SnapKvConfig::new(32, 32)).is_err(), "no entry beside the window");
/// ```
#[derive(Debug, Clone)]
pub struct SnapKv(Evicting<PromptWindow>);

/// How the scores of neighbours become one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pooling {
    /// Their average, counting zeros beyond the ends: the default of the authors' code.
    #[default]
    Average,
    /// Their maximum.
    Max,
}

/// Options of [`SnapKv`].
#[derive(Debug, Clone)]
pub struct SnapKvConfig {
    budget: TokenBudget,
    window: usize,
    kernel: usize,
    pooling: Pooling,
    group: Group,
}

impl SnapKvConfig {
    /// Keeps `budget` entries of a prompt, the last `window` among them; averages over 5 neighbours.
    #[must_use]
    pub fn new(budget: impl Into<TokenBudget>, window: usize) -> Self {
        Self {
            budget: budget.into(),
            window,
            kernel: 5,
            pooling: Pooling::default(),
            group: Group::default(),
        }
    }

    /// How scores are pooled, and over how many neighbours: an odd number, 1 for no pooling.
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
    /// [`Kernel`](CacheError::Kernel) for an even kernel,
    /// [`SnapWindow`](CacheError::SnapWindow) for an empty window.
    pub fn new(shape: &ModelShape, config: SnapKvConfig) -> Result<Self, CacheError> {
        if config.window == 0 {
            return Err(CacheError::SnapWindow);
        }
        let found = config.kernel;
        if found.is_multiple_of(2) {
            return Err(CacheError::Kernel { found });
        }
        config.budget.at_least(config.window.saturating_add(1))?;
        Ok(Self(Evicting::new(shape, PromptWindow(config))))
    }
}

forward_to_field!(SnapKv);

#[derive(Debug, Clone)]
struct PromptWindow(SnapKvConfig);

impl PromptWindow {
    /// A score for every slot of a prompt before its window.
    fn scores(&self, attention: &Attention<'_>, prompt: usize) -> Vec<f32> {
        let SnapKvConfig {
            window,
            kernel,
            pooling,
            group,
            ..
        } = self.0;
        // Queries that a draft brought after the prompt do not count.
        let end = attention
            .queries()
            .filter(|&position| position < prompt)
            .count();
        let queries = end.saturating_sub(window)..end;
        group.reduce(attention.heads().map(|head| {
            let mut sums = attention.sums(queries.clone(), head);
            sums.resize(prompt.saturating_sub(window), 0.0);
            pooled(&sums, kernel, pooling == Pooling::Average)
        }))
    }
}

impl Policy for PromptWindow {
    const NAME: &'static str = "snap_kv";
    const PER_HEAD: bool = true;

    fn options(&self) -> Vec<(&'static str, String)> {
        let pooling = match self.0.pooling {
            Pooling::Average => "average",
            Pooling::Max => "max",
        };
        vec![
            ("budget", self.0.budget.as_option()),
            ("window", self.0.window.to_string()),
            ("kernel", self.0.kernel.to_string()),
            ("pooling", pooling.into()),
            ("group", self.0.group.as_option().into()),
        ]
    }

    fn wants(&self, sequence: &Sequence) -> Observation {
        let wanted = match sequence.prompt {
            None => sequence.length > 0,
            Some(prompt) => {
                sequence.ends_prompt && self.0.budget.of(sequence).is_some_and(|b| prompt > b)
            }
        };
        if !wanted {
            return Observation::Nothing;
        }
        // What a draft brought after the prompt.
        let after = sequence.length - sequence.prompt.unwrap_or(sequence.length);
        Observation::LastQueries(self.0.window.saturating_add(after))
    }

    fn remembers(&self) -> usize {
        self.0.window
    }

    fn evict(&self, entries: &mut Entries<'_>, attention: &Attention<'_>, sequence: &Sequence) {
        let Some(prompt) = sequence.prompt.filter(|_| sequence.ends_prompt) else {
            return;
        };
        let excess = prompt.saturating_sub(self.0.budget.of(sequence).unwrap_or(prompt));
        if excess > 0 {
            let window = prompt.saturating_sub(self.0.window);
            let scores = self.scores(attention, prompt);
            entries.evict_lowest_by(&scores, entries.count() - excess, |p| p < window);
        }
    }

    fn shortest(&self, sequence: &Sequence, evicted: bool) -> usize {
        match sequence.prompt {
            // The queries that would decide after a truncation are no longer remembered.
            None => sequence.length,
            Some(prompt) if evicted => prompt,
            Some(_) => 0,
        }
    }
}
