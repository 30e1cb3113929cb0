//! Every family, and every kind of cache, small enough to drop rows soon.

use std::sync::OnceLock;

use kv_direct::{
    cache::CacheBackend,
    model::{Decoder, DecoderConfig},
    policy::{FullKv, TokenBudget, Window},
    residual::ResidualCheckpoint,
};

use crate::{
    driver,
    families::{config, gemma, qwen2, qwen3},
    simulator::{Amount, Policy},
    support::{PlanKind, random, residual},
};

pub struct Model {
    pub decoder: Decoder,
}

/// A small decoder of every family, those with windows last.
pub fn models() -> &'static [Model] {
    static MADE: OnceLock<Vec<Model>> = OnceLock::new();
    let with_probe = |config: DecoderConfig| {
        let decoder = random(&config);
        Model { decoder }
    };
    MADE.get_or_init(|| {
        let window = |layer: usize, size, mut config: DecoderConfig| {
            config.layers[layer].window = std::num::NonZeroUsize::new(size);
            config
        };
        let mut last_shows_all = gemma();
        last_shows_all.layers.rotate_left(1);
        let mut all = vec![config(4, 4), config(4, 2), config(4, 1), qwen2(), qwen3()];
        all.extend([gemma(), window(0, 5, last_shows_all)]);
        all.push(window(0, 3, window(2, 1, gemma())));
        all.into_iter().map(with_probe).collect()
    })
}

pub const FIRST_SLIDING: usize = 5;

impl Model {
    pub fn layers(&self) -> usize {
        self.decoder.shape().layers()
    }

    pub fn slides(&self) -> bool {
        self.decoder.shape().windows.iter().any(Option::is_some)
    }
}

#[derive(Debug, Clone, Copy)]
pub enum Kind {
    Full,
    Residual { hot: usize, floor: PlanKind },
    WindowShare(f64),
    Policy(Policy),
}

impl Kind {
    pub fn lossless(self) -> bool {
        matches!(self, Self::Full | Self::Residual { .. })
    }

    /// Rows that stay in a layer that shows all keys, once the step of a row of `length` tokens is over.
    pub fn most(self, prompt: Option<usize>, length: usize) -> usize {
        let of = |amount| match (amount, prompt) {
            (Amount::Rows(rows), _) => rows,
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

/// A cache whose type is known where it can do more.
pub enum Held {
    Any(Box<dyn CacheBackend>),
    Residual(Box<ResidualCheckpoint>),
}

impl Held {
    pub fn new(model: &Model, kind: Kind) -> Self {
        let shape = model.decoder.shape();
        Self::Any(match kind {
            Kind::Full => Box::new(FullKv::new(&shape)),
            Kind::Residual { hot, floor } => {
                let cache = residual(&model.decoder, hot, floor);
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
