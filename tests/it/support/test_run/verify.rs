//! Compares a cache with one that received only what remains.

use kv_direct::{
    cache::{CacheBackend, Draft},
    model::Input,
    policy::FullKv,
};

use super::{
    TestRun,
    steps::{Past, Sequence, Step, joined},
};
use crate::support::{
    caches::positions_by_head,
    feed::bits,
    kinds::{Held, Kind},
    random::VOCAB,
    simulator::Policy,
};

impl TestRun {
    /// Checks the logits of all tokens of a sequence, and what is held of it.
    pub fn verify(&self, index: usize) {
        let sequence = &self.sequences[index];
        if sequence.tokens.is_empty() {
            return;
        }
        let heads = self.decoder.config().kv_heads;
        // Its scores are other sums in a draft.
        let h2o = matches!(self.kind, Kind::Policy(Policy::H2o { .. }));
        let drafts = sequence
            .past
            .iter()
            .any(|past| matches!(past, Past::Accepted(_)));
        for &plain in if h2o || !drafts {
            &[false][..]
        } else {
            &[false, true]
        } {
            let (twin, logits) = if self.kind.lossless() {
                let mut twin: Box<dyn CacheBackend> = Box::new(FullKv::new(&self.decoder.shape()));
                let logits = self.decoder.forward(&sequence.tokens[..], &mut twin);
                (twin, bits(&logits.expect("a valid step")))
            } else {
                self.twin(sequence, plain)
            };
            let differs = sequence.logits.iter().flatten().zip(&logits);
            let differs = differs
                .enumerate()
                .find(|(_, (a, b))| a != b)
                .map(|(at, _)| at / VOCAB);
            assert_eq!(sequence.logits.len() * VOCAB, logits.len());
            assert_eq!(
                differs,
                None,
                "sequence {index} ({plain}): the first token with other logits than the twin's, {sequence:?}",
                sequence = sequence
                    .steps()
                    .map(|c| (c.tokens.len(), c.more))
                    .collect::<Vec<_>>(),
            );
            for layer in 0..self.decoder.shape().layers() {
                let ours = positions_by_head(self.held.get(), layer, index, heads);
                let theirs = positions_by_head(&*twin, layer, 0, heads);
                assert_eq!(
                    ours, theirs,
                    "cached of sequence {index} in layer {layer} ({plain})"
                );
            }
            if self.kind.lossless() {
                return;
            }
        }
    }

    /// A cache that received this sequence alone, and only what remains of it. Drafts come in fewer steps, or
    /// without a draft where `plain` allows it.
    fn twin(&self, sequence: &Sequence, plain: bool) -> (Box<dyn CacheBackend>, Vec<u32>) {
        let Held::Any(mut cache) = Held::new(self.decoder, self.kind) else {
            unreachable!("lossy")
        };
        // A step needs at least one token in some sequence.
        let is_idle = sequence.steps().any(|step| step.tokens.is_empty());
        let mut logits = Vec::new();
        let mut feed = |cache: &mut dyn CacheBackend, step: &Step| {
            let mut batch = vec![step.tokens.clone()];
            if is_idle {
                batch.push(vec![7]);
            }
            let input = Input::from(batch).more_follows(step.more);
            let found = self.decoder.forward(input, cache);
            let found = bits(&found.expect("a valid step"));
            logits.extend_from_slice(&found[..step.tokens.len() * VOCAB]);
        };
        let (mut length, mut over) = (0, false);
        let count = |steps: &[Step], length: &mut usize, over: &mut bool| {
            for step in steps {
                *length += step.tokens.len();
                *over |= !step.more && *length > 0;
            }
        };
        for past in &sequence.past {
            match past {
                Past::Step(step) => {
                    feed(&mut *cache, step);
                    count(std::slice::from_ref(step), &mut length, &mut over);
                }
                Past::Accepted(steps) => {
                    let joined = joined(steps, length, over);
                    let plain = plain && joined.len() == 1;
                    if !plain {
                        cache.begin_draft().expect("none is open");
                    }
                    joined.iter().for_each(|step| feed(&mut *cache, step));
                    if !plain {
                        cache.end_draft(Draft::Accept).expect("one is open");
                    }
                    count(steps, &mut length, &mut over);
                }
            }
        }
        if self.before.is_some() {
            cache.begin_draft().expect("none is open");
            let joined = joined(&sequence.draft, length, over);
            joined.iter().for_each(|step| feed(&mut *cache, step));
        }
        (cache, logits)
    }

    pub fn verify_all(&self) {
        (0..self.sequences.len()).for_each(|sequence| self.verify(sequence));
    }
}
