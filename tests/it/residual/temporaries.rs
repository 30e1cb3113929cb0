//! Byte budgets hold for every width of a model, for the crate's decoder and for others: the process is measured inside
//! `keys_values`, where a replay runs.

use burn::tensor::Device;
use kv_direct::{
    cache::{
        CacheBackend, CacheError, KeysValues, LayerIndex, ModelShape, ReplayCall, Span, TokenIds,
    },
    exact::Conformance,
    forward_backend,
    model::{Decoder, DecoderConfig},
    planner::{Planner, Throughput},
    residual::{Plan, ResidualCheckpoint, ResidualConfig},
};

use crate::support::{
    allocator::{MIB, live, measure_all},
    foreign::{Foreign, Kind, Place},
    models::with_windows,
    process::passes_alone,
    random::tokens,
    real_models::{GEMMA3, SMOLLM2, models, real},
};

/// A cache whose calls of `keys_values` are measured.
#[derive(Debug)]
struct Measured {
    inner: ResidualCheckpoint,
    /// The most bytes the process held in a call, beyond what it held before it.
    beside: usize,
    /// The most bytes the process held in a call.
    most: isize,
}

impl CacheBackend for Measured {
    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        let before = live();
        let (found, peak, _) = measure_all(|| self.inner.keys_values(layer, span));
        self.beside = self.beside.max(peak);
        self.most = self.most.max(before + peak.cast_signed());
        found
    }

    forward_backend!(self => self.inner; begin wants observe commit queries lifecycle clear fork);
}

/// Tokens of a step where there are sliding windows.
const STEP: usize = 64;

type RunStep<'a> = dyn Fn(&[u32], &mut Measured) + 'a;

/// A decoder, as far as the test goes.
struct Subject<'a> {
    name: String,
    shape: ModelShape,
    conformance: Conformance,
    context: usize,
    /// Whether the estimate should also be no more than a tenth too large.
    tight: bool,
    certified: bool,
    step: Box<RunStep<'a>>,
}

impl Subject<'_> {
    fn slides(&self) -> bool {
        self.shape.windows.iter().any(Option::is_some)
    }

    /// The estimate is met where nothing is held that could be dropped, and so is a budget in which entries are dropped.
    fn check(&self, plan: &Plan, bytes: usize) {
        let config = ResidualConfig::new(plan.clone()).even_if_larger();
        // Sliding windows hold more towards the end of a step than within a call: that is scratch, too.
        self.measure(config.clone(), bytes, self.tight && !self.slides());
        // Entries that are certified may stay.
        let budget = bytes * if self.certified { 2 } else { 1 };
        if budget < self.shape.keys_values_per_token() * self.context {
            self.measure(config.with_byte_budget(budget), budget, false);
        }
    }

    /// Feeds a prompt, and then single tokens, which are measured.
    fn measure(&self, config: ResidualConfig, bytes: usize, tight: bool) {
        let ids = tokens(1, self.context);
        let (prompt, last) = ids.split_at(self.context - 3);
        let base = live();
        let text = format!("{}: {config:?}, {bytes} bytes", self.name);
        let mut cache = Measured {
            inner: ResidualCheckpoint::new(&self.shape, &self.conformance, config).expect("a plan"),
            beside: 0,
            most: 0,
        };
        // A longer step would leave more in sliding windows than a small budget allows.
        let size = match self.slides() {
            true => STEP,
            false => prompt.len(),
        };
        for part in prompt.chunks(size) {
            (self.step)(part, &mut cache);
        }
        (cache.beside, cache.most) = (0, 0);
        let mut reported = 0;
        for &id in last {
            (self.step)(&[id], &mut cache);
            reported = reported.max(cache.memory().scratch_peak);
        }
        let most = (cache.most - base).unsigned_abs();
        println!(
            "{text}: {most} held ({:+.1} %); scratch {} measured, {reported} reported ({:+.1} %)",
            100.0 * (most as f64 / bytes as f64 - 1.0),
            cache.beside,
            100.0 * (cache.beside as f64 / reported as f64 - 1.0),
        );
        assert!(
            most <= bytes + bytes / 10 + MIB,
            "{text}: {most} bytes are held"
        );
        let beside = cache.beside;
        assert!(
            beside <= reported + reported / 10 + MIB,
            "{text}: {beside}, {reported} reported"
        );
        assert!(
            !tight || reported <= beside + beside / 10 + MIB,
            "{text}: {beside}, {reported} reported"
        );
    }

    /// The smallest budget of a replay from ids, and of one from residuals.
    fn check_all(&self) {
        let throughput: Throughput =
            "read 9e9; 64 tokens: projection 5e10, block 6e10, attention 2e10"
                .parse()
                .expect("throughputs of a chunk");
        let planner = Planner::new(&self.shape, &throughput, self.context).expect("sizes");
        // Buffers that kernels make once do not belong to a cache.
        self.warm();
        if self.slides() {
            let planner = planner.with_steps_of(STEP);
            let budget = planner.smallest();
            return self.check(&planner.plan(budget).expect("the smallest"), budget);
        }
        let ids = Plan::tokens(&self.shape).with_hot(8);
        let mut plans = vec![ids.clone().with_chunk(128), Plan::residuals(&self.shape)];
        if self.tight {
            plans.push(ids);
        }
        for plan in plans {
            let bytes = planner.cost(&plan).expect("a plan of this model").peak();
            self.check(&plan, bytes);
        }
    }

    fn warm(&self) {
        let plan = Plan::tokens(&self.shape).with_hot(0);
        let config = ResidualConfig::new(plan);
        let mut cache = Measured {
            inner: ResidualCheckpoint::new(&self.shape, &self.conformance, config).expect("a plan"),
            beside: 0,
            most: 0,
        };
        for count in [self.context.min(256), 1] {
            (self.step)(&tokens(2, count), &mut cache);
        }
    }
}

fn own(name: &str, config: DecoderConfig, context: usize) {
    let mut seed = 1u32;
    let decoder = Decoder::from_weights(config, &Device::flex(), |_, shape| {
        let size: usize = shape.iter().product();
        let width = *shape.last().expect("a dimension") as f32;
        let next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (f32::from((seed >> 16) as u16) / 32_768.0 - 1.0) / width.sqrt()
        };
        Ok::<_, std::convert::Infallible>(
            std::iter::repeat_with(next)
                .take(size)
                .collect::<Vec<f32>>(),
        )
    });
    measure_own(name, &decoder.expect("its fields fit"), context);
}

fn measure_own(name: &str, decoder: &Decoder, context: usize) {
    let subject = Subject {
        name: name.into(),
        shape: decoder.shape(),
        conformance: decoder.conformance().clone(),
        context,
        tight: true,
        certified: false,
        step: Box::new(|ids, cache| drop(decoder.forward(ids, cache).expect("it fits"))),
    };
    subject.check_all();
}

fn sizes([hidden, layers, heads, kv_heads, inner]: [usize; 5]) -> DecoderConfig {
    let mut config = DecoderConfig::new(97, hidden, layers, heads, kv_heads);
    (config.intermediate, config.max_positions) = (inner, 4_096);
    config
}

fn foreign(name: &str, kind: Kind, context: usize) {
    let decoder = Foreign::new(kind, 1);
    let mut shape = decoder.shape();
    if kind.stock {
        // Attention holds all scores, and keys and values of every query head.
        shape = shape.with_scratch(move |call| match call {
            ReplayCall::Forward { tokens, slots, .. } => {
                let heads = kind.heads * kind.head_dim;
                4 * (tokens * (3 * kind.hidden + 3 * heads) + 4 * tokens * slots * kind.heads)
                    + 4 * slots * 4 * heads
            }
            ReplayCall::Project { tokens } => {
                4 * tokens * 6 * (kind.hidden + 3 * kind.heads * kind.head_dim)
            }
            _ => 0,
        });
    }
    let routines = Conformance::of(&shape.kernels, &Device::flex(), shape.dtype);
    let subject = Subject {
        name: name.into(),
        shape,
        conformance: match kind.stock {
            true => routines,
            false => decoder.conformance(20),
        },
        context,
        tight: false,
        certified: kind.stock,
        step: Box::new(|ids, cache| {
            drop(
                decoder
                    .forward(TokenIds::from(ids), cache)
                    .expect("it fits"),
            );
        }),
    };
    subject.check_all();
}

#[test]
#[ignore = "counts the bytes of the whole process: the other test starts it in a process of its own"]
fn measured_alone() {
    own("hidden 64", sizes([64, 3, 4, 2, 128]), 600);
    own("hidden 512", sizes([512, 3, 8, 8, 2_048]), 600);
    own("GPT-2's widths", sizes([768, 3, 12, 12, 3_072]), 600);
    own("hidden 2,048", sizes([2_048, 2, 32, 8, 8_192]), 400);
    own("hidden 4,096", sizes([4_096, 2, 32, 8, 4_096]), 300);
    own("SmolLM2's widths", sizes([576, 4, 9, 3, 1_536]), 2_048);
    let mut gemma = with_windows(sizes([640, 6, 4, 1, 2_048]), &[0, 1, 2, 3, 4], 512);
    (gemma.head_dim, gemma.qk_norm, gemma.post_norms) = (256, true, true);
    own("Gemma 3's widths", gemma, 2_048);

    foreign("GPT-2 of 64", Kind::gpt2(64, 4, 3), 600);
    foreign("GPT-2", Kind::gpt2(768, 12, 2), 400);
    let llama = Kind {
        kv_heads: 4,
        inner: 2_816,
        fused: false,
        gated: true,
        layer_norm: false,
        biases: false,
        place: Place::Rotary,
        ..Kind::gpt2(1_024, 16, 2)
    };
    foreign("a Llama", llama, 400);
    let biases = Kind {
        biases: true,
        ..llama
    };
    foreign("a Llama with biases", biases, 400);
    let fused = Kind {
        fused: true,
        layer_norm: true,
        ..llama
    };
    foreign("a Llama, fused", fused, 400);
    let wide = Kind {
        hidden: 4_096,
        inner: 1_024,
        layer_norm: true,
        ..llama
    };
    foreign("hidden 4,096", wide, 300);
    let stock = Kind {
        stock: true,
        ..Kind::gpt2(256, 8, 2)
    };
    foreign("GPT-2 on stock operations", stock, 300);
}

#[test]
fn budgets_hold_for_every_width_and_kind_of_block() {
    passes_alone(module_path!(), "measured_alone");
}

#[test]
#[ignore = "counts the bytes of the whole process: the other test starts it in a process of its own"]
fn real_models_measured_alone() {
    for model in [SMOLLM2, GEMMA3] {
        let Some(loaded) = real(model, "budgets_hold_for_real_models") else {
            return;
        };
        measure_own(model, &loaded.decoder, 2_048);
    }
}

#[test]
fn budgets_hold_for_real_models() {
    if models("budgets_hold_for_real_models").is_some() {
        passes_alone(module_path!(), "real_models_measured_alone");
    }
}
