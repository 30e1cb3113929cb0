//! The thread that owns the decoder: one batch of the conversations that wait for a reply, and the parked ones.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

use anyhow::{Result, anyhow, ensure};
use kv_direct::{
    CacheBackend as _, ResidualCheckpoint,
    cache::{CacheError, TokenIds},
    generate::argmax,
    model::{ForwardError, Input},
    pretrained::Pretrained,
    residual::{Plan, ResidualConfig},
};
use tokio::sync::oneshot;

/// Tokens of a prompt in one step, so that a long prompt does not hold up the others.
const CHUNK: usize = 64;

enum Call {
    Reply {
        conversation: u64,
        ids: Vec<u32>,
        most: usize,
        done: oneshot::Sender<Result<Vec<u32>>>,
    },
    Close(u64),
}

/// Starts conversations. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Handle {
    calls: mpsc::Sender<Call>,
    next: Arc<AtomicU64>,
    pub(crate) figures: Arc<Figures>,
}

/// What the engine has seen.
#[derive(Default)]
pub(crate) struct Figures {
    /// The most bytes of all caches, scratch included.
    pub(crate) most_bytes: AtomicUsize,
    /// The most conversations in one step.
    pub(crate) most_together: AtomicUsize,
}

/// A conversation. It ends when this is dropped.
pub(crate) struct Conversation {
    number: u64,
    calls: mpsc::Sender<Call>,
}

impl Handle {
    pub(crate) fn open(&self) -> Conversation {
        Conversation {
            number: self.next.fetch_add(1, Ordering::Relaxed),
            calls: self.calls.clone(),
        }
    }
}

impl Conversation {
    /// The ids that follow what was said and these.
    pub(crate) async fn reply(&self, ids: Vec<u32>, most: usize) -> Result<Vec<u32>> {
        let (done, reply) = oneshot::channel();
        let conversation = self.number;
        let call = Call::Reply {
            conversation,
            ids,
            most,
            done,
        };
        self.calls
            .send(call)
            .map_err(|_| anyhow!("the engine has stopped"))?;
        reply.await?
    }
}

impl Drop for Conversation {
    fn drop(&mut self) {
        // The engine may have stopped.
        let _ = self.calls.send(Call::Close(self.number));
    }
}

/// A conversation that waits for a reply.
struct Waiting {
    conversation: u64,
    /// Ids to process: the rest of the prompt, or the last id.
    due: VecDeque<u32>,
    new: Vec<u32>,
    most: usize,
    done: oneshot::Sender<Result<Vec<u32>>>,
}

pub(crate) struct Engine {
    model: Arc<Pretrained>,
    /// The conversations in the batch, in its order.
    active: Vec<Waiting>,
    batch: ResidualCheckpoint,
    /// Those that wait until there is room in the batch.
    queue: VecDeque<Waiting>,
    /// Between replies: the cache, parked, and the last id, which no step has processed.
    parked: HashMap<u64, (ResidualCheckpoint, Option<u32>)>,
    figures: Arc<Figures>,
}

impl Engine {
    /// Starts the thread. A quarter of the budget is for parked conversations, the rest for the batch.
    pub(crate) fn start(model: Arc<Pretrained>, budget: usize) -> Result<Handle> {
        let (calls, received) = mpsc::channel();
        let shape = model.decoder.shape();
        let config = ResidualConfig::new(Plan::tokens(&shape).with_hot(usize::MAX));
        let config = config.with_byte_budget(budget - budget / 4);
        let batch = ResidualCheckpoint::new(&shape, model.decoder.conformance(), config)?;
        let figures = Arc::new(Figures::default());
        let mut engine = Self {
            model,
            active: Vec::new(),
            batch,
            queue: VecDeque::new(),
            parked: HashMap::new(),
            figures: Arc::clone(&figures),
        };
        thread::spawn(move || engine.run(&received));
        let next = Arc::default();
        Ok(Handle {
            calls,
            next,
            figures,
        })
    }

    fn run(&mut self, calls: &mpsc::Receiver<Call>) {
        loop {
            // With nothing to do, wait for a call.
            if self.active.is_empty() && self.queue.is_empty() {
                match calls.recv() {
                    Ok(call) => self.receive(call),
                    Err(_) => return,
                }
            }
            while let Ok(call) = calls.try_recv() {
                self.receive(call);
            }
            self.admit();
            self.step();
        }
    }

    fn receive(&mut self, call: Call) {
        match call {
            Call::Reply {
                conversation,
                ids,
                most,
                done,
            } => self.queue.push_back(Waiting {
                conversation,
                due: ids.into(),
                new: Vec::new(),
                most,
                done,
            }),
            Call::Close(conversation) => {
                self.parked.remove(&conversation);
                // A client that left in the middle of its reply.
                self.queue
                    .retain(|waiting| waiting.conversation != conversation);
                let place = self
                    .active
                    .iter()
                    .position(|w| w.conversation == conversation);
                if let Some(place) = place {
                    self.leave(place);
                }
            }
        }
    }

    /// Moves conversations from the queue into the batch, as long as they fit.
    fn admit(&mut self) {
        while let Some(mut waiting) = self.queue.pop_front() {
            // The first step of an empty batch fixes its sequences.
            if self.batch.lengths().is_empty() && !self.active.is_empty() {
                self.queue.push_front(waiting);
                return;
            }
            let parked = self.parked.get(&waiting.conversation);
            let held = parked.map_or(0, |(cache, _)| cache.lengths().iter().sum());
            if let Err(error) = self.fits(&waiting, held) {
                // The client may have left.
                let _ = waiting.done.send(Err(error));
                continue;
            }
            let joined = match parked {
                Some((cache, _)) => cache.state().and_then(|state| self.batch.join(&state)),
                None => self.add_empty(),
            };
            match joined {
                Ok(()) => {
                    let parked = self.parked.remove(&waiting.conversation);
                    if let Some(last) = parked.and_then(|(_, last)| last) {
                        waiting.due.push_front(last);
                    }
                    self.active.push(waiting);
                }
                Err(CacheError::StepBytes { .. }) if !self.active.is_empty() => {
                    self.queue.push_front(waiting);
                    return;
                }
                Err(error) => {
                    let _ = waiting.done.send(Err(error.into()));
                }
            }
        }
    }

    /// Checks what a decoder would refuse: a step of many conversations must not fail because of one.
    fn fits(&self, waiting: &Waiting, held: usize) -> Result<()> {
        let config = self.model.decoder.config();
        let (needed, most) = (
            held + waiting.due.len() + waiting.most,
            config.max_positions,
        );
        ensure!(
            needed < most,
            "the conversation would have {needed} tokens, the model has {most} positions"
        );
        let unknown = waiting.due.iter().find(|&&id| id as usize >= config.vocab);
        ensure!(unknown.is_none(), "the model has no id {unknown:?}");
        Ok(())
    }

    /// Adds a sequence without tokens to the batch: a copy of another, truncated.
    fn add_empty(&mut self) -> Result<(), CacheError> {
        let lengths = self.batch.lengths().to_vec();
        let shortest = (0..lengths.len()).filter(|&place| lengths[place] > 0);
        let Some(shortest) = shortest.min_by_key(|&place| lengths[place]) else {
            return Ok(());
        };
        let places: Vec<usize> = (0..lengths.len()).chain([shortest]).collect();
        self.batch.select_sequences(&places)?;
        self.batch.truncate(&[&lengths[..], &[0]].concat())
    }

    /// One step of all conversations in the batch.
    fn step(&mut self) {
        let (logits, lengths) = loop {
            if self.active.is_empty() {
                return;
            }
            let tokens = self.active.iter().map(|waiting| {
                let due = waiting.due.iter().copied();
                due.take(CHUNK).collect()
            });
            let tokens = TokenIds::from(tokens.collect::<Vec<Vec<u32>>>());
            let lengths = tokens.lengths();
            let input = Input::from(tokens).last_only();
            match self.model.decoder.forward(input, &mut self.batch) {
                Ok(logits) => break (logits, lengths),
                Err(error) => self.make_room(&error),
            }
        };
        self.note();
        let logits: Vec<f32> = logits.try_into_vec_as().expect("logits can be read");
        let vocab = logits.len() / self.active.len();
        let mut ended = Vec::new();
        for (place, waiting) in self.active.iter_mut().enumerate() {
            waiting.due.drain(..lengths[place]);
            if !waiting.due.is_empty() {
                continue;
            }
            let id = argmax(&logits[place * vocab..(place + 1) * vocab]).expect("finite logits");
            waiting.new.push(id);
            waiting.due.push_back(id);
            if waiting.new.len() >= waiting.most || self.model.eos.contains(&id) {
                ended.push(place);
            }
        }
        for place in ended.into_iter().rev() {
            let (waiting, cache) = self.leave(place);
            let last = waiting.new.last().copied();
            self.parked.insert(waiting.conversation, (cache, last));
            // The client may have left.
            let _ = waiting.done.send(Ok(waiting.new));
        }
    }

    /// After a refused step: the newest conversation waits until others have left. If it is alone, or if the step was
    /// not refused for its bytes, it cannot go on.
    fn make_room(&mut self, refused: &ForwardError) {
        let (waiting, cache) = self.leave(self.active.len() - 1);
        let bytes = matches!(refused, ForwardError::Cache(CacheError::StepBytes { .. }));
        // In the first step of a batch nothing has been processed.
        if !cache.lengths().is_empty() {
            self.parked.insert(waiting.conversation, (cache, None));
        }
        if bytes && !self.active.is_empty() {
            self.queue.push_front(waiting);
        } else {
            let _ = waiting.done.send(Err(anyhow!("{refused}")));
        }
    }

    /// Takes a conversation out of the batch. Its cache is parked.
    fn leave(&mut self, place: usize) -> (Waiting, ResidualCheckpoint) {
        let waiting = self.active.remove(place);
        let mut cache = self.batch.clone();
        let others: Vec<usize> = (0..=self.active.len())
            .filter(|&other| other != place)
            .collect();
        if !self.batch.lengths().is_empty() {
            let parked = cache.select_sequences(&[place]).and_then(|()| cache.park());
            parked.expect("it is in the batch");
            let left = self.batch.select_sequences(&others);
            left.expect("they are in the batch");
        }
        (waiting, cache)
    }

    /// Notes the bytes of all caches.
    fn note(&self) {
        let parked = self
            .parked
            .values()
            .map(|(cache, _)| cache.memory().total());
        let batch = self.batch.memory();
        let bytes = batch.total() + batch.scratch_peak + parked.sum::<usize>();
        self.figures.most_bytes.fetch_max(bytes, Ordering::Relaxed);
        self.figures
            .most_together
            .fetch_max(self.active.len(), Ordering::Relaxed);
    }
}
