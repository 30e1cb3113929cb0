//! What stays in a full-attention layer after a step.

use kv_direct::policy::{Group, Pooling};

use super::{Amount, Policy, Simulation, prompt};

/// Rounding in f32 may swap scores that are this close.
const DOUBT: f64 = 1e-5;

/// It may also swap small scores that differ by a smaller share of themselves.
const DOUBTFUL_SHARE: f64 = 1e-3;

impl Simulation<'_> {
    pub(super) fn evict(&mut self, layer: usize) {
        let (last, prompt) = prompt(self.steps).unwrap_or((usize::MAX, 0));
        let step = self.layers[layer].step;
        // Entries that may stay; `None` where this is not known before the prompt has ended.
        let known = |amount| {
            let waits = matches!(amount, Amount::Share(_)) && step < last;
            (!waits).then(|| amount.of(prompt))
        };
        for kv_head in 0..self.layers[layer].held.len() {
            let l = &self.layers[layer];
            let held = l.held[kv_head].clone();
            let count = held.len();
            let remaining = match self.policy {
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
                            // In a share that is too small the sinks come first, then the newest.
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
                        let newest = l.gave.last().expect("entries are held");
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
                    if step == last && prompt > budget {
                        let before = prompt.saturating_sub(window);
                        let by_head = self.of_group(kv_head).map(|head| {
                            let queries = &l.gave[before..];
                            let sum = |key| queries.iter().map(|heads| heads[head][key]).sum();
                            pooled(pooling, kernel, &(0..before).map(sum).collect::<Vec<f64>>())
                        });
                        let by_head: Vec<Vec<f64>> = by_head.collect();
                        let scored = (0..before)
                            .map(|p| (p, reduced(group, by_head.iter().map(|s| s[p]).collect())));
                        // The window stays, even if the share leaves no room for it.
                        let room = budget.saturating_sub(window);
                        let best = self.best(scored.collect(), room, layer, kv_head);
                        [&best[..], &held[before..]].concat()
                    } else {
                        held
                    }
                }
            };
            self.layers[layer].held[kv_head] = remaining;
        }
    }

    /// The query heads of a KV head.
    fn of_group(&self, kv_head: usize) -> std::ops::Range<usize> {
        let group = self.heads / self.layers[0].held.len();
        kv_head * group..(kv_head + 1) * group
    }

    /// The `count` positions with the largest scores, rising; of equal scores the lowest position. Where
    /// rounding decides, the crate's choice.
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
        // Equal to the last bit, and not by chance: maximum pooling copies.
        let equal = |score: f64| score == last;
        if !close(last, first) || scored.iter().all(|s| !open(s.1) || equal(s.1)) {
            return best;
        }
        self.cuts.doubtful += 1;
        let l = &self.layers[layer];
        let theirs = &self.theirs[l.step][layer][kv_head];
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
