//! Many chats under one budget of bytes: whoever speaks is resident, and whoever has been silent for
//! longest is parked for it.

use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use indicatif::ProgressBar;
use kv_direct::{
    cache::{CacheBackend, LayerIndex, Replay, ResidualCheckpoint, ResidualConfig},
    exact::{PIECE, conformance::Conformance},
    pretrained::Pretrained,
    text::Tokenizer,
};

use crate::chat::{Answer, Chat, answer};

/// All chats, and the bytes they may hold together.
pub(crate) struct Sessions<'a> {
    pub(crate) model: &'a Pretrained,
    tokenizer: &'a Tokenizer,
    sessions: Vec<Session>,
    budget: usize,
    /// Turns taken, which tells who spoke last.
    turns: usize,
}

struct Session {
    chat: Chat,
    cache: ResidualCheckpoint,
    spoke: usize,
}

/// A turn of a chat.
pub(crate) struct Turn {
    pub(crate) answer: Answer,
    /// Ids of the text up to the answer.
    pub(crate) ids: Vec<u32>,
    /// How long the chat took to come back, where it was parked.
    pub(crate) resumed: Option<Duration>,
    /// From the user's message to the first token of the answer.
    pub(crate) to_first: Duration,
    /// The most bytes held meanwhile: all caches, and the scratch of the one at work.
    pub(crate) peak: usize,
}

impl<'a> Sessions<'a> {
    /// `count` chats that have not begun.
    pub(crate) fn new(
        model: &'a Pretrained,
        tokenizer: &'a Tokenizer,
        count: usize,
        budget: usize,
    ) -> Result<Self> {
        let (decoder, shape) = (&model.decoder, model.decoder.shape());
        // One probe serves all: it is about the model's shape and the device.
        let probe = Conformance::probe(&shape.kernels, decoder.device(), shape.dtype);
        let session = |number| {
            let config = ResidualConfig::parked().with_conformance(probe.clone());
            Ok(Session {
                chat: Chat::new(number),
                cache: ResidualCheckpoint::new(&shape, decoder.device(), config)?,
                spoke: 0,
            })
        };
        Ok(Self {
            model,
            tokenizer,
            sessions: (0..count).map(session).collect::<Result<_>>()?,
            budget,
            turns: 0,
        })
    }

    /// Bytes that all chats hold between turns.
    pub(crate) fn resident(&self) -> usize {
        let caches = self.sessions.iter().map(|session| &session.cache);
        caches.map(|cache| cache.memory().total()).sum()
    }

    /// Chats that hold keys and values.
    pub(crate) fn awake(&self) -> usize {
        let caches = self.sessions.iter().map(|session| &session.cache);
        caches.filter(|cache| is_awake(cache)).count()
    }

    /// One chat hears its next message and answers with at most `new` tokens.
    pub(crate) fn turn(&mut self, number: usize, new: usize, bar: &ProgressBar) -> Result<Turn> {
        let start = Instant::now();
        let session = &mut self.sessions[number];
        let (ids, keep) = session.chat.ask(self.tokenizer)?;
        session.cache.truncate(keep)?;
        let parked = session.cache.is_parked();
        self.make_room(number, ids.len() + new)?;
        let silent = self.resident() - self.sessions[number].cache.memory().total();

        let (model, mut peak) = (self.model, 0);
        let Session { chat, cache, spoke } = &mut self.sessions[number];
        let mut watch = |cache: &ResidualCheckpoint| {
            let memory = cache.memory();
            peak = peak.max(silent + memory.total() + memory.scratch_peak);
        };
        let resuming = Instant::now();
        let done = cache.resume(
            |layer| model.decoder.at(layer),
            |layer| {
                let (done, layers) = (layer.done, layer.layers);
                bar.set_message(format!(
                    "chat {number} comes back, layer {done} of {layers}"
                ));
                ControlFlow::Continue(())
            },
        )?;
        ensure!(done.is_continue(), "nobody breaks a resume off");
        let resumed = parked.then(|| resuming.elapsed());
        watch(cache);
        bar.set_message(format!("chat {number} speaks"));
        let answer = answer(model, cache, &ids, new, watch)?;
        chat.answered(ids.clone(), &answer, self.tokenizer)?;
        self.turns += 1;
        *spoke = self.turns;
        ensure!(
            peak <= self.budget,
            "{peak} bytes were held, the budget is {}",
            self.budget
        );
        Ok(Turn {
            resumed,
            to_first: answer.first - start,
            answer,
            ids,
            peak,
        })
    }

    /// Parks chats, the longest silent first, until this one can grow to `tokens` tokens.
    fn make_room(&mut self, number: usize, tokens: usize) -> Result<()> {
        let needed = self.needed(number, tokens);
        loop {
            let own = self.sessions[number].cache.memory().total();
            let held = self.resident() - own;
            if held + needed <= self.budget {
                return Ok(());
            }
            let others = self.sessions.iter_mut().enumerate();
            let awake =
                others.filter(|(other, session)| *other != number && is_awake(&session.cache));
            let Some((_, silent)) = awake.min_by_key(|(_, session)| session.spoke) else {
                anyhow::bail!(
                    "one chat of {tokens} tokens needs {needed} bytes beside {held}, the budget is {}",
                    self.budget
                );
            };
            silent.cache.park()?;
        }
    }

    /// The most bytes a chat holds, scratch included, until it has `tokens` tokens.
    fn needed(&self, number: usize, tokens: usize) -> usize {
        let (decoder, shape) = (&self.model.decoder, self.model.decoder.shape());
        let old = self.sessions[number].cache.position(0);
        let (element, slots) = (shape.dtype.size(), tokens.next_multiple_of(PIECE));
        // Rows in whole pieces, which position each slot holds, and ids in a list that may double.
        let of_slot = shape.keys_values_per_token() + shape.layers() * size_of::<usize>();
        let resting = slots * of_slot + 2 * tokens * size_of::<u32>();
        // A layer's old buffers beside its new ones while they grow.
        let growing = old.next_multiple_of(PIECE) * of_slot / shape.layers();
        // The residual of every token to rebuild, and what takes 64 of them at a time through a block.
        let block = shape.block_scratch(1, 64, slots);
        let resuming = old.next_multiple_of(64) * shape.hidden * element + block;
        resting + growing.max(resuming)
    }
}

/// Whether a chat holds keys and values.
fn is_awake(cache: &ResidualCheckpoint) -> bool {
    cache.memory().keys_values > 0
}
