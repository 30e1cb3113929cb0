//! Caches by name and options, as scripts and reports have them (`docs/trace.md`).

use kv_direct::{
    cache::{CacheBackend, CacheError, ModelShape},
    model::Decoder,
    policy::{
        FullKv, Group, H2o, H2oConfig, Indexing, Pooling, SnapKv, SnapKvConfig, StreamingLlm,
        StreamingLlmConfig, TokenBudget, Tova, TovaConfig, Window,
    },
    residual::{Plan, ResidualCheckpoint, ResidualConfig},
};
use serde::{Deserialize, Serialize};

/// A backend and its options.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Kind {
    Full {},
    Window {
        size: usize,
    },
    StreamingLlm {
        #[serde(default = "four")]
        sinks: usize,
        recent: Amount,
        #[serde(default)]
        positions: Places,
    },
    H2o {
        budget: Amount,
        recent: Amount,
        #[serde(default)]
        sinks: usize,
        #[serde(default)]
        group: Reduce,
    },
    Tova {
        budget: Amount,
        #[serde(default)]
        protect_last: bool,
    },
    SnapKv {
        budget: Amount,
        window: usize,
        #[serde(default = "five")]
        kernel: usize,
        #[serde(default)]
        pooling: Pool,
        #[serde(default)]
        group: Reduce,
    },
    Residual {
        hot: usize,
        #[serde(default)]
        plan: Retained,
    },
}

/// A number of entries, or a share of the prompt.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(untagged)]
pub(crate) enum Amount {
    Number(usize),
    OfPrompt(f64),
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Places {
    #[default]
    CacheIndex,
    Original,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reduce {
    #[default]
    Mean,
    Sum,
    Max,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Pool {
    #[default]
    Avg,
    Max,
}

/// What a plan retains.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Retained {
    #[default]
    Tokens,
    Residuals,
    KeepTop(usize),
    ResidualAt(usize),
}

impl Kind {
    /// The names there are.
    #[allow(dead_code, reason = "only scripts use it")]
    pub(crate) const NAMES: [&str; 7] = [
        "full",
        "window",
        "streaming_llm",
        "h2o",
        "tova",
        "snap_kv",
        "residual",
    ];

    /// The plan of a backend that has one.
    #[allow(dead_code, reason = "scripts do not need it")]
    pub(crate) fn plan(&self, shape: &ModelShape) -> Option<Plan> {
        let Self::Residual { hot, plan } = self else {
            return None;
        };
        plan.plan(shape).ok().map(|plan| plan.with_hot(*hot))
    }

    /// The backend of this name with a budget of `budget` entries. `residuals` is a `residual` whose plan
    /// retains residuals. `None` where there is no such backend.
    #[allow(dead_code, reason = "scripts name every option")]
    pub(crate) fn with_budget(name: &str, budget: usize) -> Option<Self> {
        let amount = Amount::Number(budget);
        Some(match name {
            "window" => Self::Window { size: budget },
            "streaming_llm" => Self::StreamingLlm {
                sinks: 4,
                recent: Amount::Number(budget.saturating_sub(4)),
                positions: Places::default(),
            },
            "h2o" => Self::H2o {
                budget: amount,
                recent: Amount::Number(budget / 2),
                sinks: 0,
                group: Reduce::default(),
            },
            "tova" => Self::Tova {
                budget: amount,
                protect_last: false,
            },
            "snap_kv" => Self::SnapKv {
                budget: amount,
                window: (budget / 2).min(32),
                kernel: 5,
                pooling: Pool::default(),
                group: Reduce::default(),
            },
            "residual" | "residuals" => Self::Residual {
                hot: budget,
                plan: if name == "residual" {
                    Retained::Tokens
                } else {
                    Retained::Residuals
                },
            },
            _ => return None,
        })
    }

    /// An empty cache.
    pub(crate) fn cache(&self, decoder: &Decoder) -> Result<Box<dyn CacheBackend>, CacheError> {
        let shape = decoder.shape();
        Ok(match *self {
            Self::Full {} => Box::new(FullKv::new(&shape)),
            Self::Window { size } => Box::new(Window::new(&shape, size)?),
            Self::StreamingLlm {
                sinks,
                recent,
                positions,
            } => {
                let indexing = match positions {
                    Places::CacheIndex => Indexing::CacheIndex,
                    Places::Original => Indexing::Original,
                };
                let config = StreamingLlmConfig::new(recent.budget()?).with_sinks(sinks);
                Box::new(StreamingLlm::new(&shape, config.with_indexing(indexing))?)
            }
            Self::H2o {
                budget,
                recent,
                sinks,
                group,
            } => {
                let config = H2oConfig::new(budget.budget()?, recent.budget()?);
                let config = config.with_sinks(sinks).with_group(group.group());
                Box::new(H2o::new(&shape, config)?)
            }
            Self::Tova {
                budget,
                protect_last,
            } => {
                let config = TovaConfig::new(budget.budget()?).with_protected_last(protect_last);
                Box::new(Tova::new(&shape, config)?)
            }
            Self::SnapKv {
                budget,
                window,
                kernel,
                pooling,
                group,
            } => {
                let pooling = match pooling {
                    Pool::Avg => Pooling::Average,
                    Pool::Max => Pooling::Max,
                };
                let config = SnapKvConfig::new(budget.budget()?, window)
                    .with_pooling(pooling, kernel)
                    .with_group(group.group());
                Box::new(SnapKv::new(&shape, config)?)
            }
            Self::Residual { hot, plan } => {
                let plan = plan.plan(&shape)?.with_hot(hot);
                let config = ResidualConfig::new(plan).even_if_larger();
                Box::new(ResidualCheckpoint::new(
                    &shape,
                    decoder.conformance(),
                    config,
                )?)
            }
        })
    }
}

impl Retained {
    fn plan(self, shape: &ModelShape) -> Result<Plan, CacheError> {
        match self {
            Self::Tokens => Ok(Plan::tokens(shape)),
            Self::Residuals => Ok(Plan::residuals(shape)),
            Self::KeepTop(layers) => Plan::retain_top(shape, layers),
            Self::ResidualAt(layer) => Plan::residual_at(shape, layer),
        }
    }
}

impl Amount {
    fn budget(self) -> Result<TokenBudget, CacheError> {
        match self {
            Self::Number(entries) => Ok(TokenBudget::tokens(entries)),
            Self::OfPrompt(ratio) => TokenBudget::of_prompt(ratio),
        }
    }
}

impl Reduce {
    const fn group(self) -> Group {
        match self {
            Self::Mean => Group::Mean,
            Self::Sum => Group::Sum,
            Self::Max => Group::Max,
        }
    }
}

const fn four() -> usize {
    4
}

const fn five() -> usize {
    5
}
