//! A cache, what must hold in its life, and a second cache that saw only what survived.

use crate::support::CacheExt as _;
use std::ops::ControlFlow;

use kv_direct::{
    cache::{CacheBackend, CacheError, Draft, LayerIndex},
    model::{ForwardError, Input},
    policy::FullKv,
    session::{self, SessionError},
};

use crate::{
    life_kinds::{Held, Kind, Model},
    life_rows::{Call, Past, Row, joined},
    random::VOCAB,
    simulator::Policy,
    support::{PlanKind, bits, seen, tokens},
};

/// A cache, and what must be in it.
pub struct Life {
    pub model: &'static Model,
    pub kind: Kind,
    pub held: Held,
    pub rows: Vec<Row>,
    /// The rows when the open draft began.
    before: Option<Vec<Row>>,
    fed_in_draft: bool,
}

impl Life {
    pub fn new(model: &'static Model, kind: Kind) -> Self {
        Self {
            model,
            kind,
            held: Held::new(model, kind),
            rows: Vec::new(),
            before: None,
            fed_in_draft: false,
        }
    }

    pub fn lengths(&self) -> Vec<usize> {
        self.rows.iter().map(|row| row.tokens.len()).collect()
    }

    pub fn is_draft(&self) -> bool {
        self.before.is_some()
    }

    pub fn undo(&self) -> Vec<usize> {
        self.rows.iter().map(|row| row.undo).collect()
    }

    fn cached(cache: &dyn CacheBackend, layer: usize, row: usize, heads: usize) -> Vec<Vec<usize>> {
        let kept = cache.cached(LayerIndex::new(layer));
        let lists = kept.sequence(row);
        let of = |head| lists.get(head).unwrap_or(&lists[0]).clone();
        (0..heads).map(of).collect()
    }

    fn all_kept(&self, row: usize) -> Vec<Vec<Vec<usize>>> {
        let heads = self.model.decoder.config().kv_heads;
        let layers = 0..self.model.layers();
        layers
            .map(|layer| Self::cached(self.held.get(), layer, row, heads))
            .collect()
    }

    /// Feeds `lengths[row]` new tokens to every row.
    pub fn feed(&mut self, lengths: &[usize], more: bool, seed: u64) {
        let loses_vote = |(row, &n): (&Row, &usize)| n == 0 && row.shortened;
        let tova = matches!(self.kind, Kind::Policy(Policy::Tova { .. }));
        // Its newest query was taken back: the next one says what goes.
        let more = more || (tova && self.rows.iter().zip(lengths).any(loses_vote));
        let ids: Vec<Vec<u32>> = lengths
            .iter()
            .enumerate()
            .map(|(row, &n)| tokens(seed.wrapping_add(row as u64), n))
            .collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let input = Input::from(ids.clone()).more_follows(more);
        if longest == 0 {
            let model = self.model;
            return self.refused("a step without tokens", |cache| {
                let refused = model.decoder.forward(input, cache);
                matches!(
                    refused,
                    Err(ForwardError::Cache(CacheError::EmptyStep { .. }))
                )
            });
        }
        let kept: Vec<_> = (0..self.rows.len()).map(|row| self.all_kept(row)).collect();
        let logits = self.model.decoder.forward(input, self.held.get_mut());
        let logits = bits(&logits.expect("a good call"));
        self.rows.resize(lengths.len(), Row::default());
        self.fed_in_draft = true;
        for (index, (row, ids)) in self.rows.iter_mut().zip(ids).enumerate() {
            let of_row = &logits[index * longest * VOCAB..][..ids.len() * VOCAB];
            row.logits
                .extend(of_row.chunks_exact(VOCAB).map(<[u32]>::to_vec));
            if self.before.is_none() {
                row.undo = row.tokens.len();
            }
            row.tokens.extend_from_slice(&ids);
            row.shortened &= ids.is_empty();
            let ends = !more && row.prompt.is_none() && !row.tokens.is_empty();
            if ends {
                row.prompt = Some(row.tokens.len());
            }
            if ends || !ids.is_empty() {
                let call = Call { tokens: ids, more };
                match self.before {
                    Some(_) => row.draft.push(call),
                    None => row.past.push(Past::Call(call)),
                }
            }
        }
        self.check_place();
        match self.before {
            None => self.check_budget(),
            Some(_) => {
                for (row, kept) in kept.iter().enumerate() {
                    self.check_nothing_dropped(row, kept);
                }
            }
        }
    }

    /// Within a draft nothing goes, save what a window no longer shows.
    fn check_nothing_dropped(&self, row: usize, before: &[Vec<Vec<usize>>]) {
        let windows = self.model.decoder.shape().windows;
        let now = self.all_kept(row);
        for ((now, before), window) in now.iter().zip(before).zip(windows) {
            if window.is_none() {
                for (now, before) in now.iter().zip(before) {
                    let gone = before.iter().find(|position| !now.contains(position));
                    assert!(gone.is_none(), "a draft dropped {gone:?} of row {row}");
                }
            }
        }
    }

    fn check_budget(&self) {
        let windows = self.model.decoder.shape().windows;
        for (index, row) in self.rows.iter().enumerate() {
            let most = self.kind.most(row.prompt, row.tokens.len());
            for (layer, lists) in self.all_kept(index).iter().enumerate() {
                if windows[layer].is_none() {
                    let longest = lists.iter().map(Vec::len).max().unwrap_or(0);
                    assert!(longest <= most, "{longest} rows of {most} in row {index}");
                }
            }
        }
    }

    /// Positions, rows and memory.
    pub fn check_place(&self) {
        let cache = self.held.get();
        assert_eq!(cache.lengths().len(), self.rows.len(), "rows");
        for (row, length) in self.lengths().into_iter().enumerate() {
            assert_eq!(cache.length(row), length, "position of row {row}");
        }
        if self.rows.is_empty() {
            assert_eq!(cache.memory().total(), 0, "nothing is held");
        }
    }

    /// A call that answers whether it was refused as it must be, and so changes nothing.
    pub fn refused(&mut self, what: &str, call: impl FnOnce(&mut dyn CacheBackend) -> bool) {
        let before = seen(self.held.get(), self.model.layers());
        assert!(call(self.held.get_mut()), "not refused as said: {what}");
        let after = seen(self.held.get(), self.model.layers());
        assert_eq!(after, before, "changed something, though refused: {what}");
    }

    /// Checks the logits of all tokens of a row, and what is held of it.
    pub fn verify(&self, index: usize) {
        let row = &self.rows[index];
        if row.tokens.is_empty() {
            return;
        }
        let heads = self.model.decoder.config().kv_heads;
        // Its scores are other sums in a draft.
        let h2o = matches!(self.kind, Kind::Policy(Policy::H2o { .. }));
        let drafts = row
            .past
            .iter()
            .any(|past| matches!(past, Past::Accepted(_)));
        for &plain in if h2o || !drafts {
            &[false][..]
        } else {
            &[false, true]
        } {
            let (twin, logits) = if self.kind.lossless() {
                let mut twin: Box<dyn CacheBackend> =
                    Box::new(FullKv::new(&self.model.decoder.shape()));
                let logits = self.model.decoder.forward(&row.tokens[..], &mut twin);
                (twin, bits(&logits.expect("a good call")))
            } else {
                self.twin(row, plain)
            };
            let differs = row.logits.iter().flatten().zip(&logits);
            let differs = differs
                .enumerate()
                .find(|(_, (a, b))| a != b)
                .map(|(at, _)| at / VOCAB);
            assert_eq!(row.logits.len() * VOCAB, logits.len());
            assert_eq!(
                differs,
                None,
                "row {index} ({plain}): the first token with other logits than the twin's, {row:?}",
                row = row
                    .calls()
                    .map(|c| (c.tokens.len(), c.more))
                    .collect::<Vec<_>>(),
            );
            for layer in 0..self.model.layers() {
                let ours = Self::cached(self.held.get(), layer, index, heads);
                let theirs = Self::cached(&*twin, layer, 0, heads);
                assert_eq!(
                    ours, theirs,
                    "kept of row {index} in layer {layer} ({plain})"
                );
            }
            if self.kind.lossless() {
                return;
            }
        }
    }

    /// A cache that saw this row alone, and only what survived of it; drafts in fewer calls, or in one that
    /// is none where `plain` allows it.
    fn twin(&self, row: &Row, plain: bool) -> (Box<dyn CacheBackend>, Vec<u32>) {
        let Held::Any(mut cache) = Held::new(self.model, self.kind) else {
            unreachable!("lossy")
        };
        // A call that brings nothing must bring something to someone.
        let passed_by = row.calls().any(|call| call.tokens.is_empty());
        let mut logits = Vec::new();
        let mut feed = |cache: &mut dyn CacheBackend, call: &Call| {
            let mut batch = vec![call.tokens.clone()];
            if passed_by {
                batch.push(vec![7]);
            }
            let input = Input::from(batch).more_follows(call.more);
            let found = self.model.decoder.forward(input, cache);
            let found = bits(&found.expect("a good call"));
            logits.extend_from_slice(&found[..call.tokens.len() * VOCAB]);
        };
        let (mut length, mut over) = (0, false);
        let count = |calls: &[Call], length: &mut usize, over: &mut bool| {
            for call in calls {
                *length += call.tokens.len();
                *over |= !call.more && *length > 0;
            }
        };
        for past in &row.past {
            match past {
                Past::Call(call) => {
                    feed(&mut *cache, call);
                    count(std::slice::from_ref(call), &mut length, &mut over);
                }
                Past::Accepted(calls) => {
                    let joined = joined(calls, length, over);
                    let plain = plain && joined.len() == 1;
                    if !plain {
                        cache.begin_draft().expect("none is open");
                    }
                    joined.iter().for_each(|call| feed(&mut *cache, call));
                    if !plain {
                        cache.end_draft(Draft::Accept).expect("one is open");
                    }
                    count(calls, &mut length, &mut over);
                }
            }
        }
        if self.before.is_some() {
            cache.begin_draft().expect("none is open");
            let joined = joined(&row.draft, length, over);
            joined.iter().for_each(|call| feed(&mut *cache, call));
        }
        (cache, logits)
    }

    pub fn verify_all(&self) {
        (0..self.rows.len()).for_each(|row| self.verify(row));
    }

    pub fn truncate(&mut self, to: &[usize]) {
        let lengths = self.lengths();
        if to.len() != lengths.len() {
            return self.refused("another number of rows", |cache| {
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
            let start = |row: usize| before.get(row).map_or(0, |row| row.tokens.len());
            if to.iter().enumerate().any(|(row, &to)| to < start(row)) {
                return self.refused("further than the draft", |cache| {
                    let refused = cache.truncate(to);
                    matches!(refused, Err(CacheError::Irreversible { .. }))
                });
            }
        }
        let undoable = |(row, &to): (&Row, &usize)| {
            let lossless = self.kind.lossless();
            let always = match self.kind {
                Kind::Residual { floor, .. } => floor == PlanKind::Tokens || !self.model.slides(),
                Kind::Full => !self.model.slides(),
                _ => false,
            };
            to == 0 || to == row.tokens.len() || always || (lossless && to >= row.undo)
        };
        let due = all || self.before.is_some() || self.rows.iter().zip(to).all(undoable);
        for (row, (&to, &length)) in to.iter().zip(&lengths).enumerate() {
            if to < length {
                self.verify(row);
            }
        }
        let before = seen(self.held.get(), self.model.layers());
        match self.held.get_mut().truncate(to) {
            Ok(()) if all => {
                self.rows.clear();
                self.before = None;
            }
            Ok(()) => {
                for (index, (row, &to)) in self.rows.iter_mut().zip(to).enumerate() {
                    let shortened = to < row.tokens.len();
                    row.truncate(to);
                    // Of whose draft nothing is left, to that row it never came.
                    if let Some(before) = self.before.as_ref().filter(|_| shortened) {
                        let then = before.get(index).cloned().unwrap_or_default();
                        if then.tokens.len() == to {
                            *row = then;
                        }
                    }
                }
            }
            Err(CacheError::Irreversible {
                sequence: row,
                to,
                oldest,
            }) if !due => {
                assert!(to < oldest && oldest <= lengths[row], "{oldest} of {row}");
                assert_eq!(seen(self.held.get(), self.model.layers()), before);
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
        self.before = Some(self.rows.clone());
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
        (self.rows, self.before) = (before, None);
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
        before.resize(self.rows.len(), Row::default());
        let rows = self.rows.iter().zip(&before);
        // Where nothing is left of it the draft never was.
        let nothing = rows
            .clone()
            .all(|(now, then)| now.tokens.len() == then.tokens.len());
        for (row, before) in self.rows.iter_mut().zip(before) {
            let undo = before.tokens.len();
            if nothing {
                *row = before;
            } else if !row.draft.is_empty() {
                let calls = std::mem::take(&mut row.draft);
                row.past.push(Past::Accepted(calls));
            }
            if self.fed_in_draft {
                row.undo = undo;
            }
        }
        self.check_place();
        self.check_budget();
    }

    pub fn select_sequences(&mut self, rows: &[usize]) {
        if self.is_draft() {
            return self.refused("rows of a draft", |cache| {
                matches!(cache.select_sequences(rows), Err(CacheError::DraftOpen))
            });
        }
        if rows.iter().any(|&row| row >= self.rows.len()) {
            return self.refused("a row there is not", |cache| {
                matches!(
                    cache.select_sequences(rows),
                    Err(CacheError::NoSequence { .. })
                )
            });
        }
        (0..self.rows.len())
            .filter(|row| !rows.contains(row))
            .for_each(|row| self.verify(row));
        self.held
            .get_mut()
            .select_sequences(rows)
            .expect("they are there");
        self.rows = rows.iter().map(|&row| self.rows[row].clone()).collect();
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
            floor: PlanKind::Tokens,
            ..
        } = self.kind
        {
            let ids: usize = self.lengths().iter().sum();
            assert_eq!(memory.total(), ids * 4, "a token costs its id");
        }
        self.check_place();
    }

    /// Rebuilds what can be, or breaks off after some layers.
    pub fn resume(&mut self, layers: Option<usize>) {
        let Held::Residual(cache) = &mut self.held else {
            return;
        };
        let before = seen(cache, self.model.layers());
        let decoder = &self.model.decoder;
        let resumed = cache.resume(
            |layer| decoder.at(layer),
            |progress| match layers {
                Some(layers) if progress.done >= layers => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            },
        );
        if resumed.expect("it can be rebuilt").is_break() {
            assert!(layers.is_some());
            assert_eq!(seen(cache, self.model.layers()), before, "still parked");
        }
        self.check_place();
    }

    /// Goes on with a cache that had something else in it, by its state or by a file.
    pub fn move_to_another(&mut self, by_file: bool, dirty: bool) {
        let mut other = Held::new(self.model, self.kind);
        if dirty {
            let fed = self.model.decoder.forward(&[5, 6, 7][..], other.get_mut());
            fed.expect("a good call");
            other.get_mut().begin_draft().expect("none is open");
        }
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("life.safetensors");
        let model = self.model.decoder.fingerprint();
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
            let device = self.model.decoder.device();
            let loaded = session::load(&path, other.get_mut(), &model, device);
            loaded.expect("it can be read");
        } else {
            let state = self.held.get().state().expect("no draft, no step");
            let loaded = other.get_mut().set_state(&state);
            loaded.expect("of the same kind");
        }
        let layers = self.model.layers();
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

    pub fn clear(&mut self) {
        self.verify_all();
        self.held.get_mut().clear();
        (self.rows, self.before) = (Vec::new(), None);
        self.check_place();
    }

    /// An independent copy.
    pub fn fork(&self) -> Self {
        let fork = Self {
            held: Held::Any(self.held.get().fork()),
            rows: self.rows.clone(),
            before: self.before.clone(),
            ..Self::new(self.model, self.kind)
        };
        fork.check_place();
        Self {
            fed_in_draft: self.fed_in_draft,
            ..fork
        }
    }

    /// Feeds a little more, and checks every token.
    pub fn finish(&mut self) {
        if self.rows.is_empty() {
            self.feed(&[3, 2], false, 900);
        }
        let rows = self.rows.len();
        self.feed(&vec![1; rows], false, 901);
        self.feed(&vec![3; rows], false, 902);
        self.feed(&vec![1; rows], true, 903);
        self.verify_all();
    }
}
