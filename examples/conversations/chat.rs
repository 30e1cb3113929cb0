//! One conversation: its messages, their ids, and a reply through a cache.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use kv_direct::{
    cache::CacheBackend,
    generate::Generation,
    memory::MemoryReport,
    policy::FullKv,
    pretrained::Pretrained,
    text::{Message, Tokenizer},
};

use crate::bits::same_bits;

/// What was said so far.
pub(crate) struct Chat {
    topic: &'static str,
    messages: Vec<Message>,
    /// Ids of the text up to the last one that was fed.
    fed: Vec<u32>,
}

impl Chat {
    pub(crate) const fn new(number: usize) -> Self {
        Self {
            topic: TOPICS[number % TOPICS.len()],
            messages: Vec::new(),
            fed: Vec::new(),
        }
    }

    /// The user's next message: the ids of the whole text up to the reply's start, and how many of them
    /// were fed before. At least one id was not.
    pub(crate) fn ask(&mut self, tokenizer: &Tokenizer) -> Result<(Vec<u32>, usize)> {
        let turn = self.messages.len() / 2;
        let question = QUESTIONS[turn % QUESTIONS.len()].replace("{}", self.topic);
        self.messages.push(Message::new("user", question));
        let ids = tokenizer.encode_chat(&self.messages, true)?;
        // A reply's text does not always encode to the ids it was decoded from.
        let same = self.fed.iter().zip(&ids).take_while(|(a, b)| a == b);
        let keep = same.count().min(ids.len().saturating_sub(1));
        Ok((ids, keep))
    }

    /// Adds the reply to the last message. `ids` are those of the text up to it.
    pub(crate) fn add_reply(
        &mut self,
        mut ids: Vec<u32>,
        reply: &Reply,
        tokenizer: &Tokenizer,
    ) -> Result<()> {
        let text = tokenizer.decode(&reply.ids)?;
        self.messages.push(Message::new("assistant", text));
        ids.extend(&reply.ids);
        // The last id was generated, not fed.
        ids.pop();
        self.fed = ids;
        Ok(())
    }
}

/// What a model generated.
pub(crate) struct Reply {
    pub(crate) ids: Vec<u32>,
    /// When the first id was there.
    pub(crate) first: Instant,
    /// Logits that the first id and the last one were chosen by.
    pub(crate) first_logits: Vec<f32>,
    pub(crate) last_logits: Vec<f32>,
}

/// Generates at most `new` ids after the text `ids`. Calls `after_step` after every step.
pub(crate) fn reply<C>(
    model: &Pretrained,
    cache: &mut C,
    ids: &[u32],
    new: usize,
    mut after_step: impl FnMut(&C),
) -> Result<Reply>
where
    C: CacheBackend,
{
    let held = cache.lengths().first().copied().unwrap_or(0);
    let generation = Generation::new(&model.decoder, cache, &ids[held..])?;
    let mut generation = generation.with_eos(&model.eos).with_max_new(new);
    let (mut first, mut reply) = (None, Vec::new());
    while let Some(id) = generation.next() {
        reply.push(id?);
        after_step(&**generation.cache());
        first.get_or_insert_with(|| (Instant::now(), generation.logits().to_vec()));
    }
    let (first, first_logits) = first.context("a reply has an id")?;
    Ok(Reply {
        ids: reply,
        first,
        first_logits,
        last_logits: generation.logits().to_vec(),
    })
}

/// A turn of a chat that runs alone.
pub(crate) struct Alone {
    /// Ids of the whole text, the reply included.
    pub(crate) ids: Vec<u32>,
    pub(crate) last_logits: Vec<f32>,
    /// The cache between this turn and the next.
    pub(crate) memory: MemoryReport,
}

/// The same chat alone, on `FullKv`.
pub(crate) fn alone(
    model: &Pretrained,
    tokenizer: &Tokenizer,
    number: usize,
    turns: usize,
    new: usize,
) -> Result<Vec<Alone>> {
    let mut chat = Chat::new(number);
    let mut cache = FullKv::new(&model.decoder.shape());
    let turn = |_| {
        let (mut ids, keep) = chat.ask(tokenizer)?;
        // A sliding-window layer may have evicted entries that are needed there.
        if cache.truncate(&[keep]).is_err() {
            cache.clear();
        }
        let reply = reply(model, &mut cache, &ids, new, |_| ())?;
        chat.add_reply(ids.clone(), &reply, tokenizer)?;
        ids.extend(&reply.ids);
        Ok(Alone {
            ids,
            last_logits: reply.last_logits,
            memory: cache.memory(),
        })
    };
    (0..turns).map(turn).collect()
}

/// Seconds to the first token with an empty `FullKv`. Fails unless that token's logits are those of `reply`.
pub(crate) fn from_empty(model: &Pretrained, ids: &[u32], reply: &Reply) -> Result<f64> {
    let start = Instant::now();
    let mut cache = FullKv::new(&model.decoder.shape());
    let anew = self::reply(model, &mut cache, ids, 1, |_| ())?;
    ensure!(
        same_bits(&anew.first_logits, &reply.first_logits),
        "an empty cache gives other logits"
    );
    Ok((anew.first - start).as_secs_f64())
}

const TOPICS: [&str; 8] = [
    "harbours", "glaciers", "bridges", "bread", "clocks", "bees", "maps", "tides",
];

const QUESTIONS: [&str; 10] = [
    "I have begun to read about {}. What should I know first, in one sentence?",
    "What do most people get wrong about {}? Name one thing, please.",
    "Who wrote about {} first, and in which country was that?",
    "Suppose I had one free afternoon for {}. Where would I begin?",
    "Say that once more, as if to a child who has never heard of {}.",
    "Which number does everybody who works with {} know by heart?",
    "What has changed about {} in the last hundred years?",
    "I do not quite believe that. How could one check it at home?",
    "Compare {} with something from a kitchen, so that I remember it.",
    "Good. Now give me a question about {} that I can ask a friend.",
];
