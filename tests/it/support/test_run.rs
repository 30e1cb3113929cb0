//! A cache under test, and what must be in it.

mod changes;
mod steps;
mod verify;

use kv_direct::{
    cache::{CacheBackend, CacheError},
    model::{Decoder, ForwardError, Input},
};

use self::steps::{Past, Sequence, Step};
use crate::support::{
    caches::{CacheExt as _, positions_by_head, seen},
    feed::bits,
    kinds::{Held, Kind},
    random::{VOCAB, tokens},
    simulator::Policy,
};

/// A cache, and what must be in it.
pub struct TestRun {
    pub decoder: &'static Decoder,
    pub kind: Kind,
    pub held: Held,
    pub sequences: Vec<Sequence>,
    /// The sequences when the open draft began.
    before: Option<Vec<Sequence>>,
    fed_in_draft: bool,
}

impl TestRun {
    pub fn new(decoder: &'static Decoder, kind: Kind) -> Self {
        Self {
            decoder,
            kind,
            held: Held::new(decoder, kind),
            sequences: Vec::new(),
            before: None,
            fed_in_draft: false,
        }
    }

    pub fn lengths(&self) -> Vec<usize> {
        self.sequences
            .iter()
            .map(|sequence| sequence.tokens.len())
            .collect()
    }

    pub fn is_draft(&self) -> bool {
        self.before.is_some()
    }

    pub fn undo(&self) -> Vec<usize> {
        self.sequences
            .iter()
            .map(|sequence| sequence.undo)
            .collect()
    }

    fn all_cached(&self, sequence: usize) -> Vec<Vec<Vec<usize>>> {
        let heads = self.decoder.config().kv_heads;
        let layers = 0..self.decoder.shape().layers();
        layers
            .map(|layer| positions_by_head(self.held.get(), layer, sequence, heads))
            .collect()
    }

    /// Feeds `lengths[sequence]` new tokens to every sequence.
    pub fn feed(&mut self, lengths: &[usize], more: bool, seed: u64) {
        let loses_query = |(sequence, &n): (&Sequence, &usize)| n == 0 && sequence.shortened;
        let tova = matches!(self.kind, Kind::Policy(Policy::Tova { .. }));
        // The newest query was truncated: the next one decides what is evicted.
        let more = more || (tova && self.sequences.iter().zip(lengths).any(loses_query));
        let ids: Vec<Vec<u32>> = lengths
            .iter()
            .enumerate()
            .map(|(sequence, &n)| tokens(seed.wrapping_add(sequence as u64), n))
            .collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let input = Input::from(ids.clone()).more_follows(more);
        if longest == 0 {
            let decoder = self.decoder;
            return self.refused("a step without tokens", |cache| {
                let refused = decoder.forward(input, cache);
                matches!(
                    refused,
                    Err(ForwardError::Cache(CacheError::EmptyStep { .. }))
                )
            });
        }
        let cached: Vec<_> = (0..self.sequences.len())
            .map(|sequence| self.all_cached(sequence))
            .collect();
        let logits = self.decoder.forward(input, self.held.get_mut());
        let logits = bits(&logits.expect("a valid step"));
        self.sequences.resize(lengths.len(), Sequence::default());
        self.fed_in_draft = true;
        for (index, (sequence, ids)) in self.sequences.iter_mut().zip(ids).enumerate() {
            let of_sequence = &logits[index * longest * VOCAB..][..ids.len() * VOCAB];
            sequence
                .logits
                .extend(of_sequence.chunks_exact(VOCAB).map(<[u32]>::to_vec));
            if self.before.is_none() {
                sequence.undo = sequence.tokens.len();
            }
            sequence.tokens.extend_from_slice(&ids);
            sequence.shortened &= ids.is_empty();
            let ends = !more && sequence.prompt.is_none() && !sequence.tokens.is_empty();
            if ends {
                sequence.prompt = Some(sequence.tokens.len());
            }
            if ends || !ids.is_empty() {
                let step = Step { tokens: ids, more };
                match self.before {
                    Some(_) => sequence.draft.push(step),
                    None => sequence.past.push(Past::Step(step)),
                }
            }
        }
        self.check_place();
        match self.before {
            None => self.check_budget(),
            Some(_) => {
                for (sequence, cached) in cached.iter().enumerate() {
                    self.check_nothing_evicted(sequence, cached);
                }
            }
        }
    }

    /// Within a draft nothing is evicted in full-attention layers.
    fn check_nothing_evicted(&self, sequence: usize, before: &[Vec<Vec<usize>>]) {
        let windows = self.decoder.shape().windows;
        let now = self.all_cached(sequence);
        for ((now, before), window) in now.iter().zip(before).zip(windows) {
            if window.is_none() {
                for (now, before) in now.iter().zip(before) {
                    let gone = before.iter().find(|position| !now.contains(position));
                    assert!(
                        gone.is_none(),
                        "a draft evicted {gone:?} of sequence {sequence}"
                    );
                }
            }
        }
    }

    fn check_budget(&self) {
        let windows = self.decoder.shape().windows;
        for (index, sequence) in self.sequences.iter().enumerate() {
            let most = self.kind.most(sequence.prompt, sequence.tokens.len());
            for (layer, lists) in self.all_cached(index).iter().enumerate() {
                if windows[layer].is_none() {
                    let longest = lists.iter().map(Vec::len).max().unwrap_or(0);
                    assert!(
                        longest <= most,
                        "{longest} entries of {most} in sequence {index}"
                    );
                }
            }
        }
    }

    /// Checks the number of sequences, their lengths, and the memory of an empty cache.
    pub fn check_place(&self) {
        let cache = self.held.get();
        assert_eq!(cache.lengths().len(), self.sequences.len(), "sequences");
        for (sequence, length) in self.lengths().into_iter().enumerate() {
            assert_eq!(
                cache.length(sequence),
                length,
                "position of sequence {sequence}"
            );
        }
        if self.sequences.is_empty() {
            assert_eq!(cache.memory().total(), 0, "nothing is held");
        }
    }

    /// Checks that a call is refused and changes nothing. `attempt` returns whether the error is the expected
    /// one.
    pub fn refused(&mut self, what: &str, attempt: impl FnOnce(&mut dyn CacheBackend) -> bool) {
        let before = seen(self.held.get(), self.decoder.shape().layers());
        assert!(
            attempt(self.held.get_mut()),
            "not refused with the expected error: {what}"
        );
        let after = seen(self.held.get(), self.decoder.shape().layers());
        assert_eq!(after, before, "changed something, though refused: {what}");
    }

    pub fn clear(&mut self) {
        self.verify_all();
        self.held.get_mut().clear();
        (self.sequences, self.before) = (Vec::new(), None);
        self.check_place();
    }

    /// An independent copy.
    pub fn fork(&self) -> Self {
        let fork = Self {
            held: Held::Any(self.held.get().fork()),
            sequences: self.sequences.clone(),
            before: self.before.clone(),
            ..Self::new(self.decoder, self.kind)
        };
        fork.check_place();
        Self {
            fed_in_draft: self.fed_in_draft,
            ..fork
        }
    }

    /// Feeds a little more, and checks every token.
    pub fn finish(&mut self) {
        if self.sequences.is_empty() {
            self.feed(&[3, 2], false, 900);
        }
        let sequences = self.sequences.len();
        self.feed(&vec![1; sequences], false, 901);
        self.feed(&vec![3; sequences], false, 902);
        self.feed(&vec![1; sequences], true, 903);
        self.verify_all();
    }
}
