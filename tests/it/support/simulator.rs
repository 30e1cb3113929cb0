//! What each lossy policy holds, written from its rules alone: lists of positions and f64 scores, no cache.
//! A [`Simulation`] is the view of one sequence through which the reference attends.

mod evict;

use kv_direct::policy::{Group, Pooling};

use crate::support::reference::View;

/// A number of entries, or a share of the prompt.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Amount {
    Entries(usize),
    Share(f64),
}

impl Amount {
    fn of(self, prompt: usize) -> usize {
        match self {
            Self::Entries(entries) => entries,
            Self::Share(share) => ((prompt as f64 * share).floor() as usize).max(1),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Policy {
    Full,
    Window {
        size: usize,
    },
    Streaming {
        sinks: usize,
        recent: Amount,
        reindexed: bool,
    },
    H2o {
        budget: Amount,
        recent: Amount,
        sinks: usize,
        group: Group,
    },
    Tova {
        budget: Amount,
        protect_last: bool,
    },
    Snap {
        budget: Amount,
        window: usize,
        pooling: Pooling,
        kernel: usize,
        group: Group,
    },
}

/// One step of a sequence: its tokens, which may be none, and whether more of the prompt follows.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    pub tokens: usize,
    pub more_follows: bool,
}

/// The step that ends the prompt, and the tokens up to it; `None` while the prompt continues. The first step
/// that announces no more tokens ends it, once there are tokens.
pub fn prompt(steps: &[Step]) -> Option<(usize, usize)> {
    let mut tokens = 0;
    let ends = |step: &Step| {
        tokens += step.tokens;
        tokens > 0 && !step.more_follows
    };
    let last = steps.iter().position(ends)?;
    Some((last, tokens))
}

/// By layer and KV head: the positions held.
pub type Held = Vec<Vec<Vec<usize>>>;

/// Evictions decided by scores, and those of them that rounding may decide.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cuts {
    pub made: usize,
    pub doubtful: usize,
    /// Doubtful ones in which the crate chose otherwise.
    pub followed: usize,
}

impl Cuts {
    pub const fn and(self, more: Self) -> Self {
        Self {
            made: self.made + more.made,
            doubtful: self.doubtful + more.doubtful,
            followed: self.followed + more.followed,
        }
    }
}

/// A sequence under a policy.
pub struct Simulation<'a> {
    policy: Policy,
    steps: &'a [Step],
    windows: &'a [Option<usize>],
    heads: usize,
    /// What the crate held after each step. Used only where rounding decides, and then checked to be one of
    /// the sets that it may choose.
    theirs: &'a [Held],
    layers: Vec<Layer>,
    pub cuts: Cuts,
}

#[derive(Clone)]
struct Layer {
    /// The open step, the position it began at, and the one it ends before.
    step: usize,
    start: usize,
    end: usize,
    /// By KV head.
    held: Vec<Vec<usize>>,
    /// By query, head and key.
    gave: Vec<Vec<Vec<f64>>>,
    /// By KV head and position: the sums of H2O.
    sums: Vec<Vec<f64>>,
    /// Positions held after each step so far.
    after: Vec<Vec<Vec<usize>>>,
}

impl<'a> Simulation<'a> {
    pub fn new(
        policy: Policy,
        steps: &'a [Step],
        windows: &'a [Option<usize>],
        [heads, kv_heads]: [usize; 2],
        theirs: &'a [Held],
    ) -> Self {
        let layer = Layer {
            step: 0,
            start: 0,
            end: steps[0].tokens,
            held: vec![vec![]; kv_heads],
            gave: vec![],
            sums: vec![vec![0.0; steps.iter().map(|step| step.tokens).sum()]; kv_heads],
            after: vec![],
        };
        let mut new = Self {
            policy,
            steps,
            windows,
            heads,
            theirs,
            layers: vec![layer; windows.len()],
            cuts: Cuts::default(),
        };
        (0..windows.len()).for_each(|layer| new.pass_idle_steps(layer));
        new
    }

    /// Positions held after each step.
    pub fn held(&self) -> Vec<Held> {
        let after = |step: usize| {
            self.layers
                .iter()
                .map(|layer| layer.after[step].clone())
                .collect()
        };
        (0..self.steps.len()).map(after).collect()
    }

    fn pass_idle_steps(&mut self, layer: usize) {
        while self.layers[layer].step < self.steps.len()
            && self.layers[layer].start == self.layers[layer].end
        {
            self.end_step(layer);
        }
    }

    fn end_step(&mut self, layer: usize) {
        let l = &mut self.layers[layer];
        for held in &mut l.held {
            held.extend(l.start..l.end);
        }
        match self.windows[layer] {
            // The next query attends to itself and to one entry less than the window.
            Some(window) => {
                let from = l.end.saturating_sub(window - 1);
                l.held
                    .iter_mut()
                    .for_each(|held| held.retain(|&p| p >= from));
            }
            None => self.evict(layer),
        }
        let l = &mut self.layers[layer];
        l.after.push(l.held.clone());
        l.step += 1;
        l.start = l.end;
        l.end += self.steps.get(l.step).map_or(0, |step| step.tokens);
    }
}

impl View for Simulation<'_> {
    fn sees(&self, layer: usize, kv_head: usize, query: usize, key: usize) -> bool {
        let l = &self.layers[layer];
        assert!((l.start..l.end).contains(&query), "queries come in order");
        let in_window = self.windows[layer].is_none_or(|window| query.saturating_sub(key) < window);
        let held =
            key >= l.start || self.windows[layer].is_some() || l.held[kv_head].contains(&key);
        key <= query && in_window && held
    }

    fn place(&self, layer: usize, _: usize, key: usize) -> usize {
        let l = &self.layers[layer];
        let reindexed = matches!(
            self.policy,
            Policy::Streaming {
                reindexed: true,
                ..
            }
        );
        if !reindexed {
            key
        } else if key >= l.start {
            l.held[0].len() + key - l.start
        } else {
            let place = l.held[0].iter().position(|&held| held == key);
            place.expect("only what is held is read")
        }
    }

    fn gave(&mut self, layer: usize, head: usize, query: usize, shares: &[f64]) {
        let l = &mut self.layers[layer];
        if head == 0 {
            l.gave.push(vec![]);
        }
        l.gave[query].push(shares.to_vec());
        if head + 1 == self.heads && query + 1 == l.end {
            self.end_step(layer);
            self.pass_idle_steps(layer);
        }
    }
}
