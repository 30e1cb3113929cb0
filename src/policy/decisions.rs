//! Calls the policy: for new keys, after attention, at `commit`, and when a draft is accepted.

use super::{Attention, Entries, Evicting, Policy, Sequence, attention::Query};
use crate::cache::{CacheBackend, CacheError, Observation, Span};

impl<P: Policy> Evicting<P> {
    /// The full-attention layers.
    pub(super) fn full_layers(&self) -> impl Iterator<Item = usize> + use<P> {
        let slides: Vec<bool> = self.stores.layers.iter().map(|l| l.slides()).collect();
        (0..slides.len()).filter(move |&layer| !slides[layer])
    }

    /// The report that serves every sequence: the most queries that one wants, or column sums if one wants these.
    pub(super) fn wanted(&self) -> Observation {
        let wanted = |sequence: &Sequence| self.policy.wants(sequence);
        let asked = |wanted: &Observation| *wanted != Observation::LastQueries(0);
        let all = self.sequences.iter().map(wanted).filter(asked);
        all.fold(Observation::Nothing, |one, other| match (one, other) {
            (Observation::Nothing, other) => other,
            (Observation::LastQueries(one), Observation::LastQueries(other)) => {
                Observation::LastQueries(one.max(other))
            }
            (Observation::LastQueries(_), Observation::ColumnSums) => other,
            (one, _) => one,
        })
    }

    /// What attention must report: within a draft, every query of which the policy may want something later.
    pub(super) fn wanted_now(&self) -> Observation {
        let Some(prompts) = &self.draft else {
            return self.wanted();
        };
        let unfinished = |(index, sequence): (usize, &Sequence)| {
            let prompt = prompts.get(index).copied().flatten();
            let sequence = Sequence {
                prompt,
                ..*sequence
            };
            prompt.is_none() && self.policy.wants(&sequence) != Observation::Nothing
        };
        let mut sequences = self.sequences.iter().enumerate();
        if self.wanted() == Observation::Nothing && !sequences.any(unfinished) {
            return Observation::Nothing;
        }
        Observation::LastQueries(usize::MAX)
    }

    /// Lets the policy evict from one layer. `new` has the queries of the step by sequence; `beside` bytes are held
    /// meanwhile.
    pub(super) fn evict(&mut self, layer: usize, new: &[Vec<Query<'_>>], beside: usize) {
        let (policy, remembered) = (&self.policy, &self.remembered);
        let kernels = &self.stores.shape().kernels;
        let (heads, group) = (kernels.heads, kernels.heads / kernels.kv_heads.max(1));
        let sequences = &self.sequences;
        self.stores.evict(layer, beside, |store| {
            for (index, kv_head, slots) in store.lists_mut() {
                let sequence = &sequences[index];
                if remembered_queries(policy, sequence) > 0 {
                    continue;
                }
                let mut queries = remembered.of(layer, index);
                queries.extend(new.get(index).into_iter().flatten());
                let heads = match P::PER_HEAD {
                    true => kv_head * group..(kv_head + 1) * group,
                    false => 0..heads,
                };
                let attention = Attention::new(queries, heads);
                policy.evict(&mut Entries::new(slots), &attention, sequence);
            }
        });
    }

    /// Remembers the newest queries of unfinished prompts.
    pub(super) fn remember(&mut self, layer: usize, new: &[Vec<Query<'_>>]) {
        let heads = self.stores.shape().kernels.heads;
        for (index, queries) in new.iter().enumerate() {
            let sequence = &self.sequences[index];
            let (count, length) = (remembered_queries(&self.policy, sequence), sequence.length);
            let newest = &queries[queries.len().saturating_sub(count)..];
            self.remembered.add(layer, index, newest, heads, length);
            self.remembered.keep_newest(layer, index, count);
        }
    }

    /// Lets the policy evict from the layers that were not observed, and removes the queries of prompts that are over.
    pub(super) fn evict_unobserved(&mut self) {
        if P::EVICTS && self.wanted() == Observation::Nothing {
            for layer in self.full_layers() {
                self.evict(layer, &[], 0);
            }
        }
        let sequences = &self.sequences;
        let over = |index: usize| sequences.get(index).is_none_or(|s| s.prompt.is_some());
        self.remembered.forget(over);
    }

    /// Scores the new entries of a layer by their keys.
    pub(super) fn score_keys(&mut self, layer: usize, span: &Span<'_>) -> Result<(), CacheError> {
        let Some(scores) = self.policy.score_keys(&span.projection.keys) else {
            return Ok(());
        };
        let [_, kv_heads, tokens, _] = span.projection.keys.dims();
        if scores.dims() != [1, kv_heads, tokens] {
            return Err(CacheError::Shape {
                what: "scores of keys",
                expected: vec![1, kv_heads, tokens],
                found: scores.dims().to_vec(),
            });
        }
        let scores = match P::PER_HEAD {
            true => scores,
            false => scores.mean_dim(1),
        };
        let scores: Vec<f32> = scores
            .try_into_vec_as()
            .map_err(|error| CacheError::Backend(Box::new(error)))?;
        let lists = self.stores.layers[layer].lists_mut();
        for (sequence, head, slots) in lists {
            let scores = &scores[head * tokens..][span.positions.rows(sequence)];
            slots.set_scores(span.positions.slots(sequence, head), scores);
        }
        Ok(())
    }

    /// Scores the new keys of a layer and rotates its sinks.
    pub(super) fn score_and_rotate(
        &mut self,
        layer: usize,
        span: &Span<'_>,
    ) -> Result<(), CacheError> {
        self.score_keys(layer, span)?;
        let lengths: Vec<usize> = self.sequences.iter().map(|s| s.length).collect();
        let store = &mut self.stores.layers[layer];
        self.sinks.rotate(layer, store, &lengths, span.replay)
    }

    pub(super) fn prompts(&self) -> Vec<Option<usize>> {
        self.sequences.iter().map(|s| s.prompt).collect()
    }

    /// The sequences between steps, with these prompts.
    pub(super) fn at_rest(&self, prompts: &[Option<usize>]) -> Vec<Sequence> {
        let lengths = self.stores.tracker().lengths().iter().enumerate();
        let at =
            |(i, &length): (usize, &usize)| Sequence::at(length, prompts.get(i).copied().flatten());
        lengths.map(at).collect()
    }

    /// Whether a prompt has ended since `prompts` were recorded.
    pub(super) fn ended_since(prompts: &[Option<usize>], index: usize, now: Option<usize>) -> bool {
        now.is_some() && prompts.get(index).copied().flatten().is_none()
    }

    /// Evicts as if what is left of a draft had come in one step after `before` tokens.
    pub(super) fn accept(&mut self, before: &[usize], prompts: &[Option<usize>]) {
        if before == self.lengths() {
            self.sequences = self.at_rest(prompts);
            return;
        }
        let mut sequences = self.at_rest(&self.prompts());
        for (index, sequence) in sequences.iter_mut().enumerate() {
            sequence.before = before[index];
            sequence.ends_prompt = Self::ended_since(prompts, index, sequence.prompt);
        }
        self.sequences = sequences;
        let observed = self.wanted() != Observation::Nothing;
        for layer in self.full_layers() {
            if observed && self.remembered.any(layer) {
                self.evict(layer, &[], 2 * self.remembered.bytes());
            }
            for (index, sequence) in self.sequences.iter().enumerate() {
                let count = remembered_queries(&self.policy, sequence);
                self.remembered.keep_newest(layer, index, count);
            }
        }
        self.evict_unobserved();
    }
}

/// How many queries of a sequence are remembered: none once its prompt is over.
fn remembered_queries(policy: &impl Policy, sequence: &Sequence) -> usize {
    match sequence.prompt {
        None => policy.remembers(),
        Some(_) => 0,
    }
}

/// The queries of a report, by sequence: of `queries` queries the newest, as many as the sequence brought; or the one
/// that stands for all of a step. `slots` are those of each sequence.
pub(super) fn by_sequence<'a>(
    values: &'a [f32],
    heads: usize,
    queries: Option<usize>,
    slots: &[usize],
    new_tokens: &[usize],
    sequences: &[Sequence],
) -> Vec<Vec<Query<'a>>> {
    let reported = queries.unwrap_or(1);
    let width = slots.iter().copied().max().unwrap_or(0);
    let of_sequence = |(index, sequence): (usize, &Sequence)| {
        let count = match queries {
            Some(queries) => new_tokens[index].min(queries),
            None => 1,
        };
        let query = |back: usize| Query {
            position: sequence.length.saturating_sub(back),
            probabilities: &values[(index * heads * reported + reported - back) * width..],
            stride: reported * width,
            slots: slots[index],
        };
        (1..=count).rev().map(query).collect()
    };
    sequences.iter().enumerate().map(of_sequence).collect()
}
