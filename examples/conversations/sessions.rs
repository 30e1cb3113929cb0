//! Many chats within one byte budget. The active chat is resident. The longest idle one is parked first.

use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use indicatif::ProgressBar;
use kv_direct::{
    cache::CacheBackend,
    pretrained::Pretrained,
    residual::{Plan, ResidualCheckpoint},
    text::Tokenizer,
};

use crate::chat::{Chat, Reply, reply};

/// All chats, and the bytes they may hold together.
pub(crate) struct Sessions<'a> {
    pub(crate) model: &'a Pretrained,
    tokenizer: &'a Tokenizer,
    sessions: Vec<Session>,
    byte_budget: usize,
    /// Turns taken so far.
    turns: usize,
}

struct Session {
    chat: Chat,
    cache: ResidualCheckpoint,
    /// The number of its last turn.
    last_active: usize,
}

/// A turn of a chat.
pub(crate) struct Turn {
    pub(crate) reply: Reply,
    /// Ids of the text up to the reply.
    pub(crate) ids: Vec<u32>,
    /// How long the chat took to resume, if it was parked.
    pub(crate) resumed: Option<Duration>,
    /// From the user's message to the first token of the reply.
    pub(crate) to_first: Duration,
    /// The most bytes held meanwhile: all caches, and the scratch of the active one.
    pub(crate) peak: usize,
}

impl<'a> Sessions<'a> {
    /// `count` chats that have not begun.
    pub(crate) fn new(
        model: &'a Pretrained,
        tokenizer: &'a Tokenizer,
        count: usize,
        byte_budget: usize,
    ) -> Result<Self> {
        let (decoder, shape) = (&model.decoder, model.decoder.shape());
        // All entries are stored until a chat is parked.
        let plan = Plan::tokens(&shape).with_hot(usize::MAX);
        let session = |number| {
            Ok(Session {
                chat: Chat::new(number),
                cache: ResidualCheckpoint::new(&shape, decoder.conformance(), plan.clone())?,
                last_active: 0,
            })
        };
        Ok(Self {
            model,
            tokenizer,
            sessions: (0..count).map(session).collect::<Result<_>>()?,
            byte_budget,
            turns: 0,
        })
    }

    /// Bytes that all chats hold between turns.
    pub(crate) fn held(&self) -> usize {
        let caches = self.sessions.iter().map(|session| &session.cache);
        caches.map(|cache| cache.memory().total()).sum()
    }

    /// Chats that hold keys and values.
    pub(crate) fn resident_chats(&self) -> usize {
        let caches = self.sessions.iter().map(|session| &session.cache);
        caches.filter(|cache| is_resident(cache)).count()
    }

    /// Sends a chat its next message and generates the reply, at most `new` tokens.
    pub(crate) fn turn(&mut self, number: usize, new: usize, bar: &ProgressBar) -> Result<Turn> {
        let start = Instant::now();
        let session = &mut self.sessions[number];
        let (ids, keep) = session.chat.ask(self.tokenizer)?;
        let to = vec![keep; session.cache.lengths().len()];
        session.cache.truncate(&to)?;
        let parked = session.cache.is_parked();
        self.make_room(number, ids.len() + new)?;
        let others = self.held() - self.sessions[number].cache.memory().total();

        let (model, mut peak) = (self.model, 0);
        let Session {
            chat,
            cache,
            last_active,
        } = &mut self.sessions[number];
        let mut watch = |cache: &ResidualCheckpoint| {
            let memory = cache.memory();
            peak = peak.max(others + memory.total() + memory.scratch_peak);
        };
        let resuming = Instant::now();
        let done = cache.resume(
            |layer| model.decoder.at(layer),
            |layer| {
                let (done, layers) = (layer.done, layer.layers);
                bar.set_message(format!("chat {number} resumes, layer {done} of {layers}"));
                ControlFlow::Continue(())
            },
        )?;
        ensure!(done.is_continue(), "the resume is never cancelled");
        let resumed = parked.then(|| resuming.elapsed());
        watch(cache);
        bar.set_message(format!("chat {number} generates"));
        let reply = reply(model, cache, &ids, new, watch)?;
        chat.add_reply(ids.clone(), &reply, self.tokenizer)?;
        self.turns += 1;
        *last_active = self.turns;
        ensure!(
            peak <= self.byte_budget,
            "{peak} bytes were held, the budget is {}",
            self.byte_budget
        );
        Ok(Turn {
            resumed,
            to_first: reply.first - start,
            reply,
            ids,
            peak,
        })
    }

    /// Parks chats, the longest idle first, until this one can grow to `tokens` tokens.
    fn make_room(&mut self, number: usize, tokens: usize) -> Result<()> {
        let needed = self.needed(tokens)?;
        loop {
            let own = self.sessions[number].cache.memory().total();
            let held = self.held() - own;
            if held + needed <= self.byte_budget {
                return Ok(());
            }
            let others = self.sessions.iter_mut().enumerate();
            let resident =
                others.filter(|(other, session)| *other != number && is_resident(&session.cache));
            let Some((_, idle)) = resident.min_by_key(|(_, session)| session.last_active) else {
                anyhow::bail!(
                    "one chat of {tokens} tokens needs {needed} bytes beside {held}, the budget is {}",
                    self.byte_budget
                );
            };
            idle.cache.park()?;
        }
    }

    /// The most bytes a chat holds, scratch included, until it has `tokens` tokens.
    fn needed(&self, tokens: usize) -> Result<usize> {
        let shape = self.model.decoder.shape();
        let plan = Plan::tokens(&shape);
        // Parked, it replays every token; then it holds all of them.
        let parked = plan.cost(&shape, tokens)?;
        let resident = plan.with_hot(usize::MAX).cost(&shape, tokens)?;
        Ok(resident.between() + resident.scratch.max(parked.scratch))
    }
}

/// Whether a chat holds keys and values.
fn is_resident(cache: &ResidualCheckpoint) -> bool {
    cache.memory().keys_values > 0
}
