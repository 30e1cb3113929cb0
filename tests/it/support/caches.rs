//! One cache of each kind, and short forms for tests.

use kv_direct::{
    cache::{CacheBackend, CacheError, CachedPositions, LayerIndex, ModelShape, State},
    model::Decoder,
    policy::{
        FullKv, H2o, H2oConfig, Indexing, SnapKv, SnapKvConfig, StreamingLlm, StreamingLlmConfig,
        Tova, TovaConfig, Window,
    },
    residual::{Plan, ResidualCheckpoint, ResidualConfig},
};

/// What is retained of old tokens, in every full-attention layer alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanKind {
    Tokens,
    Residuals,
}

impl PlanKind {
    pub fn plan(self, shape: &ModelShape) -> Plan {
        match self {
            Self::Tokens => Plan::tokens(shape),
            Self::Residuals => Plan::residuals(shape),
        }
    }
}

/// A `ResidualCheckpoint` on the decoder's own probe.
pub fn checkpoint(decoder: &Decoder, config: impl Into<ResidualConfig>) -> ResidualCheckpoint {
    ResidualCheckpoint::new(&decoder.shape(), decoder.conformance(), config).expect("a plan")
}

/// A `ResidualCheckpoint` with `hot` hot tokens, even if it saves nothing.
pub fn residual(decoder: &Decoder, hot: usize, kind: PlanKind) -> ResidualCheckpoint {
    let shape = decoder.shape();
    let config = ResidualConfig::new(kind.plan(&shape).with_hot(hot)).even_if_larger();
    checkpoint(decoder, config)
}

/// One of each backend.
pub fn backends(decoder: &Decoder) -> Vec<(&'static str, Box<dyn CacheBackend>)> {
    let shape = decoder.shape();
    vec![
        ("FullKv", Box::new(FullKv::new(&shape))),
        (
            "Window",
            Box::new(Window::new(&shape, 6).expect("a budget")),
        ),
        (
            "ResidualCheckpoint",
            Box::new(residual(decoder, 6, PlanKind::Tokens)),
        ),
        (
            "ResidualCheckpoint, residuals",
            Box::new(residual(decoder, 6, PlanKind::Residuals)),
        ),
    ]
}

/// Everything a caller can see of a cache.
pub fn seen<C>(cache: &C, layers: usize) -> (Vec<usize>, Vec<CachedPositions>, usize)
where
    C: CacheBackend + ?Sized,
{
    let positions = cache.lengths().to_vec();
    let cached = (0..layers)
        .map(|layer| cache.cached(LayerIndex::new(layer)))
        .collect();
    (positions, cached, cache.memory().total())
}

/// The list of a head: its own, or the one that all heads share.
pub fn of_head(lists: &[Vec<usize>], head: usize) -> &Vec<usize> {
    lists.get(head).unwrap_or(&lists[0])
}

/// Cached positions of a sequence at a layer, for each of `heads` KV heads.
pub fn positions_by_head(
    cache: &dyn CacheBackend,
    layer: usize,
    sequence: usize,
    heads: usize,
) -> Vec<Vec<usize>> {
    let cached = cache.cached(LayerIndex::new(layer));
    let lists = cached.sequence(sequence);
    (0..heads)
        .map(|head| of_head(lists, head).clone())
        .collect()
}

/// Short forms for tests.
pub trait CacheExt: CacheBackend {
    /// Truncates every sequence that is longer to `to` tokens; beyond all of them it is refused.
    fn truncate_all(&mut self, to: usize) -> Result<(), CacheError> {
        let longest = self.lengths().iter().copied().max().unwrap_or(0);
        if to > longest {
            return self.truncate(&vec![to; self.lengths().len()]);
        }
        let to: Vec<usize> = self.lengths().iter().map(|&n| to.min(n)).collect();
        self.truncate(&to)
    }

    /// Processed tokens of a sequence, 0 if there is none.
    fn length(&self, sequence: usize) -> usize {
        self.lengths().get(sequence).copied().unwrap_or(0)
    }
}

impl<C: CacheBackend + ?Sized> CacheExt for C {}

/// The options of a state, to make another with.
pub fn options(state: &State) -> Vec<(String, String)> {
    let options = state.options();
    options
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// A `ResidualCheckpoint` that stores keys and values of its last layer.
fn top_stored(decoder: &Decoder, hot: usize) -> ResidualCheckpoint {
    let shape = decoder.shape();
    let config = ResidualConfig::new(Plan::retain_top(&shape, 1).expect("a layer").with_hot(hot));
    checkpoint(decoder, config)
}

/// By name: a budget of `budget` entries, or what is nearest to it; every token is hot where a cache is parked.
pub fn zoo(decoder: &Decoder, budget: usize) -> Vec<(&'static str, Box<dyn CacheBackend>)> {
    let shape = decoder.shape();
    let streaming = |indexing| {
        let config = StreamingLlmConfig::new(budget - 2).with_sinks(2);
        StreamingLlm::new(&shape, config.with_indexing(indexing))
    };
    let mut all: Vec<(&'static str, Box<dyn CacheBackend>)> = vec![
        ("full_kv", Box::new(FullKv::new(&shape))),
        (
            "residual",
            Box::new(residual(decoder, budget, PlanKind::Tokens)),
        ),
        (
            "residual parked",
            Box::new(residual(decoder, usize::MAX, PlanKind::Tokens)),
        ),
        (
            "residual of residuals",
            Box::new(residual(decoder, budget, PlanKind::Residuals)),
        ),
        (
            "residual, the top stored",
            Box::new(top_stored(decoder, budget)),
        ),
        (
            "window",
            Box::new(Window::new(&shape, budget).expect("a budget")),
        ),
        (
            "streaming_llm",
            Box::new(streaming(Indexing::Original).expect("recent tokens")),
        ),
        (
            "h2o",
            Box::new(H2o::new(&shape, H2oConfig::new(budget, budget / 2)).expect("half of it")),
        ),
        (
            "tova",
            Box::new(Tova::new(&shape, TovaConfig::new(budget)).expect("a budget")),
        ),
        (
            "snap_kv",
            Box::new(SnapKv::new(&shape, SnapKvConfig::new(budget, 2)).expect("above the window")),
        ),
    ];
    if let Ok(re_indexed) = streaming(Indexing::CacheIndex) {
        all.push(("streaming_llm re-indexed", Box::new(re_indexed)));
    }
    all
}
