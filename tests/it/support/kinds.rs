//! Every kind of cache, small enough to evict or drop soon.

use std::sync::OnceLock;

use kv_direct::{
    cache::CacheBackend,
    model::Decoder,
    policy::{FullKv, Group, Pooling, TokenBudget, Window},
    residual::ResidualCheckpoint,
};

use crate::support::{
    caches::{PlanKind, residual},
    driver,
    feed::feed,
    models::{config, gemma, qwen2, qwen3, random_decoder, with_windows},
    random::tokens,
    simulator::{Amount, Policy},
    test_run::TestRun,
};

/// A small decoder of every family; those with sliding-window layers come last.
pub fn decoders() -> &'static [Decoder] {
    static MADE: OnceLock<Vec<Decoder>> = OnceLock::new();
    MADE.get_or_init(|| {
        let mut full_attention_last = gemma();
        full_attention_last.layers.rotate_left(1);
        let mut all = vec![config(4, 4), config(4, 2), config(4, 1), qwen2(), qwen3()];
        all.extend([gemma(), with_windows(full_attention_last, &[0], 5)]);
        all.push(with_windows(with_windows(gemma(), &[2], 1), &[0], 3));
        all.iter().map(random_decoder).collect()
    })
}

/// Index of the first decoder with sliding-window layers.
pub const FIRST_SLIDING: usize = 5;

#[derive(Debug, Clone, Copy)]
pub enum Kind {
    Full,
    Residual { hot: usize, plan_kind: PlanKind },
    WindowShare(f64),
    Policy(Policy),
}

impl Kind {
    pub fn lossless(self) -> bool {
        matches!(self, Self::Full | Self::Residual { .. })
    }

    /// The most entries that stay in a full-attention layer, after a step of a sequence of `length` tokens.
    pub fn most(self, prompt: Option<usize>, length: usize) -> usize {
        let of = |amount| match (amount, prompt) {
            (Amount::Entries(entries), _) => entries,
            (Amount::Share(share), Some(prompt)) => ((prompt as f64 * share) as usize).max(1),
            (Amount::Share(_), None) => length,
        };
        match self {
            Self::Full | Self::Residual { .. } => length,
            Self::WindowShare(share) => of(Amount::Share(share)),
            Self::Policy(policy) => match policy {
                Policy::Full => length,
                Policy::Window { size } => size,
                Policy::Streaming { sinks, recent, .. } => sinks + of(recent),
                Policy::H2o { budget, sinks, .. } => of(budget).max(sinks),
                Policy::Tova { budget, .. } => of(budget).max(1),
                Policy::Snap { budget, window, .. } => match prompt {
                    Some(prompt) => of(budget).max(window) + length - prompt,
                    None => length,
                },
            },
        }
    }
}

/// A cache, with its type where that offers more.
pub enum Held {
    Any(Box<dyn CacheBackend>),
    Residual(Box<ResidualCheckpoint>),
}

impl Held {
    pub fn new(decoder: &Decoder, kind: Kind) -> Self {
        let shape = decoder.shape();
        Self::Any(match kind {
            Kind::Full => Box::new(FullKv::new(&shape)),
            Kind::Residual { hot, plan_kind } => {
                let cache = residual(decoder, hot, plan_kind);
                return Self::Residual(Box::new(cache));
            }
            Kind::WindowShare(share) => {
                let size = TokenBudget::of_prompt(share).expect("a share");
                Box::new(Window::new(&shape, size).expect("a budget"))
            }
            Kind::Policy(policy) => driver::backend(policy, &shape).expect("a fitting policy"),
        })
    }

    pub fn get(&self) -> &dyn CacheBackend {
        match self {
            Self::Any(cache) => &**cache,
            Self::Residual(cache) => &**cache,
        }
    }

    pub fn get_mut(&mut self) -> &mut dyn CacheBackend {
        match self {
            Self::Any(cache) => &mut **cache,
            Self::Residual(cache) => &mut **cache,
        }
    }
}

/// One of every kind, small enough to evict or drop soon.
pub fn kinds() -> Vec<Kind> {
    let residual = |hot, plan_kind| Kind::Residual { hot, plan_kind };
    let streaming = |reindexed| {
        Kind::Policy(Policy::Streaming {
            sinks: 2,
            recent: Amount::Entries(4),
            reindexed,
        })
    };
    vec![
        Kind::Full,
        residual(0, PlanKind::Tokens),
        residual(4, PlanKind::Tokens),
        residual(usize::MAX, PlanKind::Tokens),
        residual(4, PlanKind::Residuals),
        residual(usize::MAX, PlanKind::Residuals),
        Kind::Policy(Policy::Window { size: 6 }),
        Kind::WindowShare(0.5),
        streaming(false),
        streaming(true),
        h2o(Amount::Entries(6)),
        h2o(Amount::Share(0.5)),
        tova(Amount::Entries(6)),
        tova(Amount::Share(0.5)),
        snap(Amount::Entries(6)),
        snap(Amount::Share(0.5)),
    ]
}

pub fn h2o(budget: Amount) -> Kind {
    let recent = match budget {
        Amount::Entries(entries) => Amount::Entries(entries / 2),
        Amount::Share(share) => Amount::Share(share / 2.0),
    };
    Kind::Policy(Policy::H2o {
        budget,
        recent,
        sinks: 1,
        group: Group::Mean,
    })
}

pub fn tova(budget: Amount) -> Kind {
    Kind::Policy(Policy::Tova {
        budget,
        protect_last: false,
    })
}

pub fn snap(budget: Amount) -> Kind {
    Kind::Policy(Policy::Snap {
        budget,
        window: 2,
        pooling: Pooling::Average,
        kernel: 3,
        group: Group::Mean,
    })
}

/// Every kind on a model of full-attention layers and, where it supports them, on one with sliding-window
/// layers.
pub fn every_kind() -> impl Iterator<Item = (&'static Decoder, Kind)> {
    let reindexed = |kind: &Kind| {
        matches!(
            kind,
            Kind::Policy(Policy::Streaming {
                reindexed: true,
                ..
            })
        )
    };
    let all = kinds().into_iter();
    let sliding = kinds().into_iter().filter(move |kind| !reindexed(kind));
    all.map(|kind| (&decoders()[1], kind))
        .chain(sliding.map(|kind| (&decoders()[FIRST_SLIDING], kind)))
}

pub fn every_run() -> impl Iterator<Item = TestRun> {
    every_kind().map(|(model, kind)| TestRun::new(model, kind))
}

/// Both caches continue with the same bits.
#[track_caller]
pub fn continue_alike(decoder: &Decoder, one: &mut dyn CacheBackend, other: &mut dyn CacheBackend) {
    let sequences = one.lengths().len().max(1);
    for index in 0..4 {
        let step: Vec<_> = (0..sequences as u64)
            .map(|sequence| tokens(70 + index + sequence, 2))
            .collect();
        let (found, expected) = (feed(decoder, one, step.clone()), feed(decoder, other, step));
        assert!(found == expected, "{one:?} in index {index}");
    }
}
