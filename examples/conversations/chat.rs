//! One conversation: what is asked, which ids that makes, and an answer through a cache.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use kv_direct::{
    cache::CacheBackend,
    generate::argmax,
    memory::MemoryReport,
    model::Input,
    policy::FullKv,
    pretrained::Pretrained,
    text::{Message, Tokenizer},
};

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

    /// The user's next message: the ids of the whole text up to the answer's start, and how many of them
    /// were fed before. One id at least was not.
    pub(crate) fn ask(&mut self, tokenizer: &Tokenizer) -> Result<(Vec<u32>, usize)> {
        let turn = self.messages.len() / 2;
        let question = QUESTIONS[turn % QUESTIONS.len()].replace("{}", self.topic);
        self.messages.push(Message::new("user", question));
        let ids = tokenizer.encode_chat(&self.messages, true)?;
        // An answer's text does not always encode to the ids it was decoded from.
        let same = self.fed.iter().zip(&ids).take_while(|(a, b)| a == b);
        let keep = same.count().min(ids.len().saturating_sub(1));
        Ok((ids, keep))
    }

    /// Takes note of the answer to the last message, whose text up to the answer has these ids.
    pub(crate) fn answered(
        &mut self,
        mut ids: Vec<u32>,
        answer: &Answer,
        tokenizer: &Tokenizer,
    ) -> Result<()> {
        let text = tokenizer.decode(&answer.ids)?;
        self.messages.push(Message::new("assistant", text));
        ids.extend(&answer.ids);
        // The last id was generated, not fed.
        ids.pop();
        self.fed = ids;
        Ok(())
    }
}

/// What a model answered.
pub(crate) struct Answer {
    pub(crate) ids: Vec<u32>,
    /// When the first id was there.
    pub(crate) first: Instant,
    /// Logits that the first id and the last one were chosen by.
    pub(crate) first_logits: Vec<f32>,
    pub(crate) last_logits: Vec<f32>,
}

/// Answers to a text of `ids` with at most `new` ids, going on where `cache` stands; `called` looks at
/// the cache after every call of the decoder. (A `Generation` would do, but for its logits.)
pub(crate) fn answer<C>(
    model: &Pretrained,
    cache: &mut C,
    ids: &[u32],
    new: usize,
    mut called: impl FnMut(&C),
) -> Result<Answer>
where
    C: CacheBackend,
{
    let (mut first, mut answer) = (None, Vec::new());
    let mut due = ids[cache.lengths()[0]..].to_vec();
    loop {
        let input = Input::from(&due[..]).last_only();
        let logits = model.decoder.forward(input, cache)?;
        let logits: Vec<f32> = logits.try_into_vec_as()?;
        called(cache);
        let id = argmax(&logits).context("the logits are not finite")?;
        answer.push(id);
        let (first, first_logits) = first.get_or_insert_with(|| (Instant::now(), logits.clone()));
        if answer.len() == new || model.eos.contains(&id) {
            return Ok(Answer {
                ids: answer,
                first: *first,
                first_logits: std::mem::take(first_logits),
                last_logits: logits,
            });
        }
        due = vec![id];
    }
}

/// A turn of a chat that has the machine for itself and keeps everything.
pub(crate) struct Alone {
    /// Ids of the whole text, the answer included.
    pub(crate) ids: Vec<u32>,
    pub(crate) last_logits: Vec<f32>,
    /// The cache between this turn and the next.
    pub(crate) memory: MemoryReport,
}

/// A whole chat through a `FullKv`, turn by turn.
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
        // A layer with a window may have let go of what would be needed there.
        if cache.truncate(&[keep]).is_err() {
            cache.clear();
        }
        let answer = answer(model, &mut cache, &ids, new, |_| ())?;
        chat.answered(ids.clone(), &answer, tokenizer)?;
        ids.extend(&answer.ids);
        Ok(Alone {
            ids,
            last_logits: answer.last_logits,
            memory: cache.memory(),
        })
    };
    (0..turns).map(turn).collect()
}

/// Whether two rows of logits are the same bits.
pub(crate) fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Seconds to the first token of an answer where nothing was kept and the whole text is taken in anew by
/// a `FullKv`; fails unless that token's logits are those of `answer`.
pub(crate) fn from_nothing(model: &Pretrained, ids: &[u32], answer: &Answer) -> Result<f64> {
    let start = Instant::now();
    let mut cache = FullKv::new(&model.decoder.shape());
    let anew = self::answer(model, &mut cache, ids, 1, |_| ())?;
    ensure!(
        same_bits(&anew.first_logits, &answer.first_logits),
        "a text taken in anew has other logits"
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
