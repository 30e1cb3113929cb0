//! Feeds a backend and the oracle with the same steps, and compares cached positions and logits.

use kv_direct::{
    cache::{CacheBackend, CacheError, ModelShape, TokenIds},
    model::{Decoder, DecoderConfig, Input},
    policy::{
        FullKv, H2o, H2oConfig, Indexing, SnapKv, SnapKvConfig, StreamingLlm, StreamingLlmConfig,
        TokenBudget, Tova, TovaConfig, Window,
    },
};

use crate::support::{
    caches::positions_by_head,
    feed::apart,
    models::{self, TOLERANCE},
    random::{VOCAB, decoder, tokens, weights},
    reference::Reference,
    simulator::{Amount, Cuts, Held, Policy, Simulation, Step},
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
            Self::new("llama 4/2", models::config(4, 2)),
            Self::new("llama 4/4", models::config(4, 4)),
            Self::new("llama 4/1", models::config(4, 1)),
            Self::new("qwen2", models::qwen2()),
            Self::new("qwen3", models::qwen3()),
            Self::new("gemma", models::gemma()),
        ]
    }

    pub fn slides(&self) -> bool {
        self.windows.iter().any(Option::is_some)
    }
}

fn budget(amount: Amount) -> TokenBudget {
    match amount {
        Amount::Entries(entries) => entries.into(),
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
            budget: entries,
            recent,
            sinks,
            group,
        } => {
            let config = H2oConfig::new(budget(entries), budget(recent)).with_sinks(sinks);
            Box::new(H2o::new(shape, config.with_group(group))?)
        }
        Policy::Tova {
            budget: entries,
            protect_last,
        } => {
            let config = TovaConfig::new(budget(entries)).with_protected_last(protect_last);
            Box::new(Tova::new(shape, config)?)
        }
        Policy::Snap {
            budget: entries,
            window,
            pooling,
            kernel,
            group,
        } => {
            let config = SnapKvConfig::new(budget(entries), window).with_pooling(pooling, kernel);
            Box::new(SnapKv::new(shape, config.with_group(group))?)
        }
    })
}

/// Steps of a batch: the tokens of each sequence, and whether more of the prompt follows.
pub type Steps = Vec<(Vec<usize>, bool)>;

/// What the crate did in all steps: logits by sequence, and positions held by sequence and step.
pub struct Run {
    pub tokens: Vec<Vec<u32>>,
    pub logits: Vec<Vec<f32>>,
    pub held: Vec<Vec<Held>>,
}

pub fn run(
    model: &Model,
    cache: &mut dyn CacheBackend,
    steps: &[(Vec<usize>, bool)],
    seed: u64,
) -> Run {
    let lengths =
        (0..steps[0].0.len()).map(|sequence| steps.iter().map(|step| step.0[sequence]).sum());
    let ids = lengths
        .enumerate()
        .map(|(sequence, length)| tokens(seed + sequence as u64, length));
    run_on(model, cache, steps, ids.collect())
}

/// As [`run`], on these tokens. There may be more tokens than the steps bring.
pub fn run_on(
    model: &Model,
    cache: &mut dyn CacheBackend,
    steps: &[(Vec<usize>, bool)],
    mut tokens: Vec<Vec<u32>>,
) -> Run {
    let sequences = tokens.len();
    for (sequence, tokens) in tokens.iter_mut().enumerate() {
        tokens.truncate(steps.iter().map(|step| step.0[sequence]).sum());
    }
    let mut run = Run {
        tokens: tokens.clone(),
        logits: vec![vec![]; sequences],
        held: vec![vec![]; sequences],
    };
    let mut rest: Vec<&[u32]> = tokens.iter().map(Vec::as_slice).collect();
    for (lengths, more_follows) in steps {
        let take = |(rest, &n): (&mut &[u32], _)| rest.split_off(..n).expect("enough").to_vec();
        let step: TokenIds = rest.iter_mut().zip(lengths).map(take).collect();
        let longest = step.longest();
        let input = Input::from(step).more_follows(*more_follows);
        let logits = model.decoder.forward(input, &mut *cache);
        let logits = logits.expect("a valid step").into_data();
        let logits: Vec<f32> = logits.try_to_vec().expect("f32");
        for (sequence, logits) in logits.chunks_exact(longest * VOCAB).enumerate() {
            run.logits[sequence].extend_from_slice(&logits[..lengths[sequence] * VOCAB]);
            let held = (0..model.windows.len())
                .map(|layer| positions_by_head(cache, layer, sequence, model.config.kv_heads));
            run.held[sequence].push(held.collect());
        }
    }
    run
}

impl Run {
    /// Appends what a sequence did in later steps.
    pub fn extend(&mut self, sequence: usize, more: &Self) {
        self.tokens[sequence].extend_from_slice(&more.tokens[sequence]);
        self.logits[sequence].extend_from_slice(&more.logits[sequence]);
        self.held[sequence].extend_from_slice(&more.held[sequence]);
    }
}

pub fn of_sequence(steps: &[(Vec<usize>, bool)], sequence: usize) -> Vec<Step> {
    let of_sequence = |(lengths, more_follows): &(Vec<usize>, bool)| Step {
        tokens: lengths[sequence],
        more_follows: *more_follows,
    };
    steps.iter().map(of_sequence).collect()
}

/// Compares a run with the oracle, sequence by sequence.
#[track_caller]
pub fn assert_obeys(
    model: &Model,
    policy: Policy,
    steps: &[(Vec<usize>, bool)],
    run: &Run,
) -> Cuts {
    let mut cuts = Cuts::default();
    for sequence in 0..run.tokens.len() {
        let of_sequence = of_sequence(steps, sequence);
        cuts = cuts.and(assert_sequence_obeys(
            model,
            policy,
            &of_sequence,
            run,
            sequence,
            0,
        ));
    }
    cuts
}

/// Compares one sequence with the oracle; positions from step `from` on.
#[track_caller]
pub fn assert_sequence_obeys(
    model: &Model,
    policy: Policy,
    steps: &[Step],
    run: &Run,
    sequence: usize,
    from: usize,
) -> Cuts {
    let what = format!("{}, {policy:?}, {steps:?}, sequence {sequence}", model.name);
    let heads = [model.config.heads, model.config.kv_heads];
    let theirs = &run.held[sequence];
    let mut simulation = Simulation::new(policy, steps, &model.windows, heads, theirs);
    let expected = model
        .reference
        .logits_of(&run.tokens[sequence], &mut simulation);
    for (step, held) in simulation.held().iter().enumerate().skip(from) {
        for (layer, held) in held.iter().enumerate() {
            assert_eq!(
                theirs[step][layer], *held,
                "held in layer {layer} after step {step}: {what}"
            );
        }
    }
    let delta = apart(&run.logits[sequence], expected.into_iter().flatten());
    // An angle in f32 has an error in proportion to its position.
    let tolerance = if run.tokens[sequence].len() > 256 {
        2.0
    } else {
        1.0
    } * TOLERANCE;
    assert!(delta <= tolerance, "logits are {delta:e} off: {what}");
    simulation.cuts
}
