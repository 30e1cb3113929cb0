//! Feeds a backend and the oracle with the same calls and compares them: what is held after every call
//! and the logits of every token.

use kv_direct::{
    cache::{CacheBackend, CacheError, LayerIndex, ModelShape, TokenIds},
    model::{Decoder, DecoderConfig, Input},
    policy::{
        FullKv, H2o, H2oConfig, Indexing, SnapKv, SnapKvConfig, StreamingLlm, StreamingLlmConfig,
        TokenBudget, Tova, TovaConfig, Window,
    },
};

use crate::{
    families::{self, TOLERANCE},
    random::{VOCAB, apart, decoder, tokens, weights},
    reference::Reference,
    simulator::{Amount, Call, Cuts, Held, Policy, Simulation},
};

pub struct Model {
    pub name: &'static str,
    pub config: DecoderConfig,
    pub decoder: Decoder,
    pub reference: Reference,
    pub windows: Vec<Option<usize>>,
}

impl Model {
    pub fn new(name: &'static str, config: DecoderConfig) -> Self {
        let weights = weights(&config);
        let windows = config.layers.iter();
        Self {
            name,
            decoder: decoder(&config, &weights),
            reference: Reference::new(&config, &weights),
            windows: windows.map(|layer| layer.window.map(|w| w.get())).collect(),
            config,
        }
    }

    pub fn all() -> Vec<Self> {
        vec![
            Self::new("llama 4/2", families::config(4, 2)),
            Self::new("llama 4/4", families::config(4, 4)),
            Self::new("llama 4/1", families::config(4, 1)),
            Self::new("qwen2", families::qwen2()),
            Self::new("qwen3", families::qwen3()),
            Self::new("gemma", families::gemma()),
        ]
    }

    pub fn slides(&self) -> bool {
        self.windows.iter().any(Option::is_some)
    }
}

fn budget(amount: Amount) -> TokenBudget {
    match amount {
        Amount::Rows(rows) => rows.into(),
        Amount::Share(share) => TokenBudget::of_prompt(share).expect("a share"),
    }
}

/// The crate's backend for a policy.
pub fn backend(policy: Policy, shape: &ModelShape) -> Result<Box<dyn CacheBackend>, CacheError> {
    Ok(match policy {
        Policy::Full => Box::new(FullKv::new(shape)),
        Policy::Window { size } => Box::new(Window::new(shape, size)?),
        Policy::Streaming {
            sinks,
            recent,
            reindexed,
        } => {
            let indexing = if reindexed {
                Indexing::CacheIndex
            } else {
                Indexing::Original
            };
            let config = StreamingLlmConfig::new(budget(recent)).with_sinks(sinks);
            Box::new(StreamingLlm::new(shape, config.with_indexing(indexing))?)
        }
        Policy::H2o {
            budget: rows,
            recent,
            sinks,
            group,
        } => {
            let config = H2oConfig::new(budget(rows), budget(recent)).with_sinks(sinks);
            Box::new(H2o::new(shape, config.with_group(group))?)
        }
        Policy::Tova {
            budget: rows,
            protect_last,
        } => {
            let config = TovaConfig::new(budget(rows)).with_protected_last(protect_last);
            Box::new(Tova::new(shape, config)?)
        }
        Policy::Snap {
            budget: rows,
            window,
            pooling,
            kernel,
            group,
        } => {
            let config = SnapKvConfig::new(budget(rows), window).with_pooling(pooling, kernel);
            Box::new(SnapKv::new(shape, config.with_group(group))?)
        }
    })
}

/// Calls of a batch: how many tokens each row brings, and whether more of the prompt follows.
pub type Calls = Vec<(Vec<usize>, bool)>;

/// What the crate did in all calls: by row its logits, and by row and call what was held.
pub struct Run {
    pub tokens: Vec<Vec<u32>>,
    pub logits: Vec<Vec<f32>>,
    pub held: Vec<Vec<Held>>,
}

pub fn run(
    model: &Model,
    cache: &mut dyn CacheBackend,
    calls: &[(Vec<usize>, bool)],
    seed: u64,
) -> Run {
    let lengths = (0..calls[0].0.len()).map(|row| calls.iter().map(|call| call.0[row]).sum());
    let ids = lengths
        .enumerate()
        .map(|(row, length)| tokens(seed + row as u64, length));
    run_on(model, cache, calls, ids.collect())
}

/// As [`run`], on these tokens, of which there may be more than the calls take.
pub fn run_on(
    model: &Model,
    cache: &mut dyn CacheBackend,
    calls: &[(Vec<usize>, bool)],
    mut tokens: Vec<Vec<u32>>,
) -> Run {
    let rows = tokens.len();
    for (row, tokens) in tokens.iter_mut().enumerate() {
        tokens.truncate(calls.iter().map(|call| call.0[row]).sum());
    }
    let mut run = Run {
        tokens: tokens.clone(),
        logits: vec![vec![]; rows],
        held: vec![vec![]; rows],
    };
    let mut rest: Vec<&[u32]> = tokens.iter().map(Vec::as_slice).collect();
    for (lengths, more_follows) in calls {
        let take = |(rest, &n): (&mut &[u32], _)| rest.split_off(..n).expect("enough").to_vec();
        let call: TokenIds = rest.iter_mut().zip(lengths).map(take).collect();
        let longest = call.longest();
        let input = Input::from(call).more_follows(*more_follows);
        let logits = model.decoder.forward(input, &mut *cache);
        let logits = logits.expect("a good call").into_data();
        let logits: Vec<f32> = logits.try_to_vec().expect("f32");
        for (row, logits) in logits.chunks_exact(longest * VOCAB).enumerate() {
            run.logits[row].extend_from_slice(&logits[..lengths[row] * VOCAB]);
            let held = (0..model.windows.len()).map(|layer| {
                let kept = cache.cached(LayerIndex::new(layer));
                let lists = kept.sequence(row);
                let of_head = |head| lists.get(head).unwrap_or(&lists[0]).clone();
                (0..model.config.kv_heads).map(of_head).collect()
            });
            run.held[row].push(held.collect());
        }
    }
    run
}

impl Run {
    /// What a row did in later calls.
    pub fn extend(&mut self, row: usize, more: &Self) {
        self.tokens[row].extend_from_slice(&more.tokens[row]);
        self.logits[row].extend_from_slice(&more.logits[row]);
        self.held[row].extend_from_slice(&more.held[row]);
    }
}

pub fn of_row(calls: &[(Vec<usize>, bool)], row: usize) -> Vec<Call> {
    let of_row = |(lengths, more_follows): &(Vec<usize>, bool)| Call {
        tokens: lengths[row],
        more_follows: *more_follows,
    };
    calls.iter().map(of_row).collect()
}

/// Compares a run with the oracle, row by row.
#[track_caller]
pub fn assert_obeys(
    model: &Model,
    policy: Policy,
    calls: &[(Vec<usize>, bool)],
    run: &Run,
) -> Cuts {
    let mut cuts = Cuts::default();
    for row in 0..run.tokens.len() {
        let of_row = of_row(calls, row);
        cuts = cuts.and(assert_row_obeys(model, policy, &of_row, run, row, 0));
    }
    cuts
}

/// Compares a row with the oracle, what it held from a call on.
#[track_caller]
pub fn assert_row_obeys(
    model: &Model,
    policy: Policy,
    calls: &[Call],
    run: &Run,
    row: usize,
    from: usize,
) -> Cuts {
    let what = format!("{}, {policy:?}, {calls:?}, row {row}", model.name);
    let heads = [model.config.heads, model.config.kv_heads];
    let theirs = &run.held[row];
    let mut simulation = Simulation::new(policy, calls, &model.windows, heads, theirs);
    let expected = model.reference.logits_of(&run.tokens[row], &mut simulation);
    for (call, held) in simulation.held().iter().enumerate().skip(from) {
        for (layer, held) in held.iter().enumerate() {
            assert_eq!(
                theirs[call][layer], *held,
                "held in layer {layer} after call {call}: {what}"
            );
        }
    }
    let delta = apart(&run.logits[row], expected.into_iter().flatten());
    // An angle in f32 is off in proportion to its position.
    let tolerance = if run.tokens[row].len() > 256 {
        2.0
    } else {
        1.0
    } * TOLERANCE;
    assert!(delta <= tolerance, "logits are {delta:e} off: {what}");
    simulation.cuts
}
