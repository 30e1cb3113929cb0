//! What each lossy policy holds, written from its rules alone: lists of positions and f64 scores, no
//! cache. A [`Simulation`] is the view of one batch row through which the reference attends; a call's
//! probabilities decide what the next call sees.

use kv_direct::policy::{Group, Pooling};

use crate::reference::View;

/// Scores this close are told apart by rounding, in f32.
const DOUBT: f64 = 1e-5;
/// Nor are small ones that differ by a smaller share of themselves.
const DOUBTFUL_SHARE: f64 = 1e-3;

/// Rows, or a share of the prompt.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Amount {
    Rows(usize),
    Share(f64),
}

impl Amount {
    fn of(self, prompt: usize) -> usize {
        match self {
            Self::Rows(rows) => rows,
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

/// One call as a batch row has it: its tokens, which may be none, and whether more of the prompt follow.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    pub tokens: usize,
    pub more_follows: bool,
}

/// The call with which the prompt ends, the first that does not say otherwise once there are tokens, and
/// the tokens up to it; none while it goes on.
pub fn prompt(calls: &[Call]) -> Option<(usize, usize)> {
    let mut tokens = 0;
    let ends = |call: &Call| {
        tokens += call.tokens;
        tokens > 0 && !call.more_follows
    };
    let last = calls.iter().position(ends)?;
    Some((last, tokens))
}

/// By layer and KV head: the positions held.
pub type Held = Vec<Vec<Vec<usize>>>;

/// Cuts made by a score, and those among them that rounding may decide.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cuts {
    pub made: usize,
    pub doubtful: usize,
    /// Doubtful ones in which the crate did choose otherwise.
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

/// A batch row under a policy.
pub struct Simulation<'a> {
    policy: Policy,
    calls: &'a [Call],
    windows: &'a [Option<usize>],
    heads: usize,
    /// After each call what the crate held. Asked only where rounding decides, and then checked to be
    /// one of the sets it may choose from.
    theirs: &'a [Held],
    layers: Vec<Layer>,
    pub cuts: Cuts,
}

#[derive(Clone)]
struct Layer {
    /// The call under way, and the positions it began at and ends before.
    call: usize,
    start: usize,
    end: usize,
    /// By KV head.
    held: Vec<Vec<usize>>,
    /// By query, head and key.
    gave: Vec<Vec<Vec<f64>>>,
    /// By KV head and position: the sums of H2O.
    sums: Vec<Vec<f64>>,
    /// After each call so far.
    after: Vec<Vec<Vec<usize>>>,
}

impl<'a> Simulation<'a> {
    pub fn new(
        policy: Policy,
        calls: &'a [Call],
        windows: &'a [Option<usize>],
        [heads, kv_heads]: [usize; 2],
        theirs: &'a [Held],
    ) -> Self {
        let layer = Layer {
            call: 0,
            start: 0,
            end: calls[0].tokens,
            held: vec![vec![]; kv_heads],
            gave: vec![],
            sums: vec![vec![0.0; calls.iter().map(|call| call.tokens).sum()]; kv_heads],
            after: vec![],
        };
        let mut new = Self {
            policy,
            calls,
            windows,
            heads,
            theirs,
            layers: vec![layer; windows.len()],
            cuts: Cuts::default(),
        };
        (0..windows.len()).for_each(|layer| new.pass_silent_calls(layer));
        new
    }

    /// What was held after each call.
    pub fn held(&self) -> Vec<Held> {
        let after = |call: usize| {
            self.layers
                .iter()
                .map(|layer| layer.after[call].clone())
                .collect()
        };
        (0..self.calls.len()).map(after).collect()
    }

    fn pass_silent_calls(&mut self, layer: usize) {
        while self.layers[layer].call < self.calls.len()
            && self.layers[layer].start == self.layers[layer].end
        {
            self.end_call(layer);
        }
    }

    fn end_call(&mut self, layer: usize) {
        let l = &mut self.layers[layer];
        for held in &mut l.held {
            held.extend(l.start..l.end);
        }
        match self.windows[layer] {
            // The next query sees itself and one row less than the window.
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
        l.call += 1;
        l.start = l.end;
        l.end += self.calls.get(l.call).map_or(0, |call| call.tokens);
    }

    fn evict(&mut self, layer: usize) {
        let (last, prompt) = prompt(self.calls).unwrap_or((usize::MAX, 0));
        let call = self.layers[layer].call;
        // Rows that may stay; none says that this is not known before the prompt has ended.
        let known = |amount| {
            let waits = matches!(amount, Amount::Share(_)) && call < last;
            (!waits).then(|| amount.of(prompt))
        };
        for kv_head in 0..self.layers[layer].held.len() {
            let l = &self.layers[layer];
            let held = l.held[kv_head].clone();
            let count = held.len();
            let kept = match self.policy {
                Policy::Full => held,
                Policy::Window { size } => held[count.saturating_sub(size)..].to_vec(),
                Policy::Streaming { sinks, recent, .. } => match known(recent) {
                    Some(recent) if count > sinks + recent => {
                        [&held[..sinks], &held[count - recent..]].concat()
                    }
                    _ => held,
                },
                Policy::H2o {
                    budget,
                    recent,
                    sinks,
                    group,
                } => {
                    let gain = |key: usize| {
                        let by_head = self.of_group(kv_head).map(|head| {
                            let queries = l.gave[l.start..l.end].iter();
                            queries.map(|heads| heads[head][key]).sum()
                        });
                        reduced(group, by_head.collect())
                    };
                    let gains: Vec<f64> = held.iter().map(|&key| gain(key)).collect();
                    for (&key, gain) in held.iter().zip(gains) {
                        self.layers[layer].sums[kv_head][key] += gain;
                    }
                    match (known(budget), known(recent)) {
                        (Some(budget), Some(recent)) if count > budget => {
                            // Of a share that is too small sinks come first, then the newest.
                            let recent = recent.min(budget.saturating_sub(sinks));
                            let sinks = sinks.min(count);
                            let newest = (count - recent).max(sinks);
                            let sums = &self.layers[layer].sums[kv_head];
                            let middle = &held[sinks..newest];
                            let scored = middle.iter().map(|&p| (p, sums[p])).collect();
                            let room = budget.saturating_sub(sinks + recent);
                            let best = self.best(scored, room, layer, kv_head);
                            [&held[..sinks], &best, &held[newest..]].concat()
                        }
                        _ => held,
                    }
                }
                Policy::Tova {
                    budget,
                    protect_last,
                } => match known(budget) {
                    Some(budget) if count > budget => {
                        let newest = l.gave.last().expect("rows are held");
                        let score = |p: usize| {
                            newest.iter().map(|head| head[p]).sum::<f64>() / newest.len() as f64
                        };
                        let protected = usize::from(protect_last);
                        let (free, safe) = held.split_at(count - protected);
                        let scored = free.iter().map(|&p| (p, score(p))).collect();
                        let best = self.best(scored, budget - protected, layer, kv_head);
                        [&best, safe].concat()
                    }
                    _ => held,
                },
                Policy::Snap {
                    budget,
                    window,
                    pooling,
                    kernel,
                    group,
                } => {
                    let budget = budget.of(prompt);
                    if call == last && prompt > budget {
                        let before = prompt.saturating_sub(window);
                        let by_head = self.of_group(kv_head).map(|head| {
                            let queries = &l.gave[before..];
                            let sum = |key| queries.iter().map(|heads| heads[head][key]).sum();
                            pooled(pooling, kernel, &(0..before).map(sum).collect::<Vec<f64>>())
                        });
                        let by_head: Vec<Vec<f64>> = by_head.collect();
                        let scored = (0..before)
                            .map(|p| (p, reduced(group, by_head.iter().map(|s| s[p]).collect())));
                        // The window stays, even if a share leaves no room for it.
                        let room = budget.saturating_sub(window);
                        let best = self.best(scored.collect(), room, layer, kv_head);
                        [&best[..], &held[before..]].concat()
                    } else {
                        held
                    }
                }
            };
            self.layers[layer].held[kv_head] = kept;
        }
    }

    /// The query heads of a KV head.
    fn of_group(&self, kv_head: usize) -> std::ops::Range<usize> {
        let group = self.heads / self.layers[0].held.len();
        kv_head * group..(kv_head + 1) * group
    }

    /// The `count` positions of the largest scores, rising; of equal ones the lowest. Where rounding
    /// decides, those the crate has.
    fn best(
        &mut self,
        mut scored: Vec<(usize, f64)>,
        count: usize,
        layer: usize,
        kv_head: usize,
    ) -> Vec<usize> {
        let count = count.min(scored.len());
        scored.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let mut best: Vec<usize> = scored[..count].iter().map(|s| s.0).collect();
        best.sort_unstable();
        if count == 0 || count == scored.len() {
            return best;
        }
        self.cuts.made += 1;
        let (last, first) = (scored[count - 1].1, scored[count].1);
        let close = |a: f64, b: f64| {
            let apart = (a - b).abs();
            apart < DOUBT && apart < DOUBTFUL_SHARE * a.max(b)
        };
        let open = |score: f64| close(score, last) || close(score, first);
        // Equal to the last bit, not by chance: maximum pooling copies.
        let equal = |score: f64| score == last;
        if !close(last, first) || scored.iter().all(|s| !open(s.1) || equal(s.1)) {
            return best;
        }
        self.cuts.doubtful += 1;
        let l = &self.layers[layer];
        let theirs = &self.theirs[l.call][layer][kv_head];
        let chosen: Vec<&(usize, f64)> = scored.iter().filter(|s| theirs.contains(&s.0)).collect();
        let sure = |s: &(usize, f64)| !open(s.1) && s.1 > last;
        let allowed = chosen.len() == count
            && chosen.iter().all(|s| sure(s) || open(s.1))
            && scored.iter().all(|s| !sure(s) || theirs.contains(&s.0));
        if !allowed {
            return best;
        }
        let mut chosen: Vec<usize> = chosen.into_iter().map(|s| s.0).collect();
        chosen.sort_unstable();
        self.cuts.followed += usize::from(chosen != best);
        chosen
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
            self.end_call(layer);
            self.pass_silent_calls(layer);
        }
    }
}

fn reduced(group: Group, scores: Vec<f64>) -> f64 {
    match group {
        Group::Mean => scores.iter().sum::<f64>() / scores.len() as f64,
        Group::Sum => scores.iter().sum(),
        Group::Max => scores.into_iter().fold(f64::NEG_INFINITY, f64::max),
        other => panic!("no simulation of {other:?}"),
    }
}

fn pooled(pooling: Pooling, kernel: usize, scores: &[f64]) -> Vec<f64> {
    let around = |at: usize| {
        let near = &scores[at.saturating_sub(kernel / 2)..(at + kernel / 2 + 1).min(scores.len())];
        match pooling {
            Pooling::Average => near.iter().sum::<f64>() / kernel as f64,
            Pooling::Max => near.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            other => panic!("no simulation of {other:?}"),
        }
    };
    (0..scores.len()).map(around).collect()
}
