//! Truncation, drafts, selection, parking, and moves to another cache.

use std::ops::ControlFlow;

use kv_direct::{
    cache::{CacheBackend, CacheError, Draft},
    session::{self, SessionError},
};

use super::{
    TestRun,
    steps::{Past, Sequence},
};
use crate::support::{
    caches::{PlanKind, seen},
    kinds::{Held, Kind},
    models::slides,
};

impl TestRun {
    pub fn truncate(&mut self, to: &[usize]) {
        let lengths = self.lengths();
        if to.len() != lengths.len() {
            return self.refused("another number of sequences", |cache| {
                matches!(cache.truncate(to), Err(CacheError::Sequences { .. }))
            });
        }
        if to.iter().zip(&lengths).any(|(to, length)| to > length) {
            return self.refused("beyond the end", |cache| {
                let refused = cache.truncate(to);
                matches!(refused, Err(CacheError::TruncateBeyond { .. }))
            });
        }
        let all = to.iter().all(|&to| to == 0);
        if let Some(before) = self.before.as_ref().filter(|_| !all) {
            let start = |sequence: usize| {
                before
                    .get(sequence)
                    .map_or(0, |sequence| sequence.tokens.len())
            };
            if to
                .iter()
                .enumerate()
                .any(|(sequence, &to)| to < start(sequence))
            {
                return self.refused("further than the draft", |cache| {
                    let refused = cache.truncate(to);
                    matches!(refused, Err(CacheError::Irreversible { .. }))
                });
            }
        }
        let undoable = |(sequence, &to): (&Sequence, &usize)| {
            let lossless = self.kind.lossless();
            let always = match self.kind {
                Kind::Residual { plan_kind, .. } => {
                    plan_kind == PlanKind::Tokens || !slides(self.decoder)
                }
                Kind::Full => !slides(self.decoder),
                _ => false,
            };
            to == 0 || to == sequence.tokens.len() || always || (lossless && to >= sequence.undo)
        };
        let due = all || self.before.is_some() || self.sequences.iter().zip(to).all(undoable);
        for (sequence, (&to, &length)) in to.iter().zip(&lengths).enumerate() {
            if to < length {
                self.verify(sequence);
            }
        }
        let before = seen(self.held.get(), self.decoder.shape().layers());
        match self.held.get_mut().truncate(to) {
            Ok(()) if all => {
                self.sequences.clear();
                self.before = None;
            }
            Ok(()) => {
                for (index, (sequence, &to)) in self.sequences.iter_mut().zip(to).enumerate() {
                    let shortened = to < sequence.tokens.len();
                    sequence.truncate(to);
                    // A sequence of which no draft token is left is as it was before the draft.
                    if let Some(before) = self.before.as_ref().filter(|_| shortened) {
                        let then = before.get(index).cloned().unwrap_or_default();
                        if then.tokens.len() == to {
                            *sequence = then;
                        }
                    }
                }
            }
            Err(CacheError::Irreversible {
                sequence,
                to,
                shortest,
            }) if !due => {
                assert!(
                    to < shortest && shortest <= lengths[sequence],
                    "{shortest} of {sequence}"
                );
                assert_eq!(seen(self.held.get(), self.decoder.shape().layers()), before);
            }
            refused => panic!("truncation of {lengths:?} to {to:?}: {refused:?}"),
        }
        self.check_place();
    }

    pub fn begin_draft(&mut self) {
        if self.is_draft() {
            return self.refused("a second draft", |cache| {
                matches!(cache.begin_draft(), Err(CacheError::DraftOpen))
            });
        }
        self.held.get_mut().begin_draft().expect("none is open");
        self.before = Some(self.sequences.clone());
        self.fed_in_draft = false;
    }

    fn discard(&mut self) {
        let Some(before) = self.before.clone() else {
            return self.refused("discarding no draft", |cache| {
                matches!(cache.end_draft(Draft::Discard), Err(CacheError::NoDraft))
            });
        };
        self.verify_all();
        self.held
            .get_mut()
            .end_draft(Draft::Discard)
            .expect("one is open");
        (self.sequences, self.before) = (before, None);
        self.check_place();
    }

    pub fn end_draft(&mut self, draft: Draft) {
        match draft {
            Draft::Accept => self.accept(),
            Draft::Discard => self.discard(),
        }
    }

    fn accept(&mut self) {
        let Some(mut before) = self.before.clone() else {
            return self.refused("accepting no draft", |cache| {
                matches!(cache.end_draft(Draft::Accept), Err(CacheError::NoDraft))
            });
        };
        self.held
            .get_mut()
            .end_draft(Draft::Accept)
            .expect("one is open");
        self.before = None;
        before.resize(self.sequences.len(), Sequence::default());
        let sequences = self.sequences.iter().zip(&before);
        // A draft of which nothing is left has no effect.
        let nothing = sequences
            .clone()
            .all(|(now, then)| now.tokens.len() == then.tokens.len());
        for (sequence, before) in self.sequences.iter_mut().zip(before) {
            let undo = before.tokens.len();
            if nothing {
                *sequence = before;
            } else if !sequence.draft.is_empty() {
                let steps = std::mem::take(&mut sequence.draft);
                sequence.past.push(Past::Accepted(steps));
            }
            if self.fed_in_draft {
                sequence.undo = undo;
            }
        }
        self.check_place();
        self.check_budget();
    }

    pub fn select_sequences(&mut self, sequences: &[usize]) {
        if self.is_draft() {
            return self.refused("sequences of a draft", |cache| {
                matches!(
                    cache.select_sequences(sequences),
                    Err(CacheError::DraftOpen)
                )
            });
        }
        if sequences
            .iter()
            .any(|&sequence| sequence >= self.sequences.len())
        {
            return self.refused("a sequence there is not", |cache| {
                matches!(
                    cache.select_sequences(sequences),
                    Err(CacheError::NoSequence { .. })
                )
            });
        }
        (0..self.sequences.len())
            .filter(|sequence| !sequences.contains(sequence))
            .for_each(|sequence| self.verify(sequence));
        self.held
            .get_mut()
            .select_sequences(sequences)
            .expect("they are there");
        self.sequences = sequences
            .iter()
            .map(|&sequence| self.sequences[sequence].clone())
            .collect();
        self.check_place();
    }

    pub fn park(&mut self) {
        if !matches!(self.kind, Kind::Residual { .. }) {
            return self.refused("parked", |cache| {
                matches!(cache.park(), Err(CacheError::Unsupported { .. }))
            });
        }
        self.held.get_mut().park().expect("no step is open");
        let memory = self.held.get().memory();
        if let Kind::Residual {
            plan_kind: PlanKind::Tokens,
            ..
        } = self.kind
        {
            let ids: usize = self.lengths().iter().sum();
            assert_eq!(memory.total(), ids * 4, "a token costs its id");
        }
        self.check_place();
    }

    /// Resumes, or stops after some layers.
    pub fn resume(&mut self, layers: Option<usize>) {
        let Held::Residual(cache) = &mut self.held else {
            return;
        };
        let before = seen(cache, self.decoder.shape().layers());
        let decoder = &self.decoder;
        let resumed = (**cache).resume(
            |layer| decoder.at(layer),
            |progress| match layers {
                Some(layers) if progress.done >= layers => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            },
        );
        if resumed.expect("it can be rebuilt").is_break() {
            assert!(layers.is_some());
            assert_eq!(
                seen(cache, self.decoder.shape().layers()),
                before,
                "still parked"
            );
        }
        self.check_place();
    }

    /// Continues with a cache that held something else, through its state or through a file.
    pub fn move_to_another(&mut self, by_file: bool, dirty: bool) {
        let mut other = Held::new(self.decoder, self.kind);
        if dirty {
            let fed = self.decoder.forward(&[5, 6, 7][..], other.get_mut());
            fed.expect("a valid step");
            other.get_mut().begin_draft().expect("none is open");
        }
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("life.safetensors");
        let model = self.decoder.fingerprint();
        if self.is_draft() {
            self.refused("the state of a draft", |cache| {
                matches!(cache.state(), Err(CacheError::DraftOpen))
            });
            return self.refused("a file of a draft", |cache| {
                let refused = session::save(&path, cache, &model);
                let typed = matches!(
                    refused,
                    Err(SessionError::Cache {
                        source: CacheError::DraftOpen,
                        ..
                    })
                );
                typed && !path.exists()
            });
        }
        if by_file {
            session::save(&path, self.held.get(), &model).expect("it can be written");
            let device = self.decoder.device();
            let loaded = session::load(&path, other.get_mut(), &model, device);
            loaded.expect("it can be read");
        } else {
            let state = self.held.get().state().expect("no open draft or step");
            let loaded = other.get_mut().set_state(&state);
            loaded.expect("of the same kind");
        }
        let layers = self.decoder.shape().layers();
        let (ours, theirs) = (seen(self.held.get(), layers), seen(other.get(), layers));
        assert_eq!((ours.0, ours.1), (theirs.0, theirs.1), "what is held");
        let (ours, theirs) = (self.held.get().memory(), other.get().memory());
        assert_eq!(ours.keys_values, theirs.keys_values);
        assert_eq!(ours.residuals, theirs.residuals);
        assert_eq!(ours.tokens, theirs.tokens);
        assert!(
            theirs.total() <= ours.total(),
            "no more slack than there was"
        );
        self.held = other;
        self.check_place();
    }
}
