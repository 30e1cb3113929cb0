//! A decoder of another crate, in any dtype: blocks built from the routines of `exact`, a cache, and nothing of `model`.

use burn::tensor::{DType, Device, Int, Tensor, TensorData, activation};
use kv_direct::{
    cache::{
        CacheBackend, CacheError, KeysValues, LayerIndex, ModelShape, Projection, Replay, Span,
        Step, TokenIds,
    },
    exact::{AttentionParams, KernelShapes, Weight, attention, linear, rms_norm},
    positions::Positions,
};

use crate::support::{caches::CacheExt as _, random::noise};

/// Sizes. The residual stream and the feed-forward layer are wider than a part of 512, in which stock products are cut.
const HIDDEN: usize = 520;

const INNER: usize = 600;

const HEADS: usize = 4;

const HEAD: usize = 64;

const LAYERS: usize = 2;

const VOCAB: usize = 97;

pub struct Engine {
    dtype: DType,
    kv_heads: usize,
    embedding: Tensor<2>,
    blocks: Vec<Block>,
    head: Weight,
}

struct Block {
    norms: [Tensor<1>; 2],
    query: Weight,
    key_value: Weight,
    output: Weight,
    gate_up: Weight,
    down: Weight,
}

/// Noise around `centre`.
fn random<const D: usize>(
    seed: u64,
    shape: [usize; D],
    (centre, spread): (f64, f64),
    dtype: DType,
) -> Tensor<D> {
    let values = noise(seed).map(|x| centre + spread * x);
    let data: Vec<f64> = values.take(shape.iter().product()).collect();
    Tensor::from_data(TensorData::new(data, shape), (&Device::flex(), dtype))
}

/// The bytes of every element.
pub fn raw<const D: usize>(tensor: Tensor<D>) -> Vec<u8> {
    tensor.into_data().as_bytes().to_vec()
}

impl Engine {
    pub fn new(dtype: DType, kv_heads: usize) -> Self {
        let matrix = |seed, shape: [usize; 2]| {
            let spread = 1.5 * (3.0 / shape[0] as f64).sqrt();
            Weight::new(random(seed, shape, (0.0, spread), dtype))
        };
        let block = |seed: u64| Block {
            norms: [0, 1].map(|n| random(seed + n, [HIDDEN], (1.0, 0.3), dtype)),
            query: matrix(seed + 2, [HIDDEN, HEADS * HEAD]),
            key_value: matrix(seed + 3, [HIDDEN, 2 * kv_heads * HEAD]),
            output: matrix(seed + 4, [HEADS * HEAD, HIDDEN]),
            gate_up: matrix(seed + 5, [HIDDEN, 2 * INNER]),
            down: matrix(seed + 6, [INNER, HIDDEN]),
        };
        Self {
            dtype,
            kv_heads,
            embedding: random(1, [VOCAB, HIDDEN], (0.0, 1.0), dtype),
            blocks: (1..=LAYERS as u64).map(|layer| block(10 * layer)).collect(),
            head: matrix(2, [HIDDEN, VOCAB]),
        }
    }

    pub fn shape(&self) -> ModelShape {
        let mut kernels = KernelShapes::new(HEADS, self.kv_heads, HEAD);
        kernels.linears = vec![
            [HIDDEN, HEADS * HEAD],
            [HIDDEN, 2 * self.kv_heads * HEAD],
            [HEADS * HEAD, HIDDEN],
            [HIDDEN, 2 * INNER],
            [INNER, HIDDEN],
            [HIDDEN, VOCAB],
        ];
        kernels.norms = vec![HIDDEN];
        ModelShape::new(LAYERS, HIDDEN, self.dtype, kernels)
    }

    /// The bytes of the logits of every token of one step.
    pub fn feed<C>(&self, cache: &mut C, tokens: &[u32]) -> Vec<Vec<u8>>
    where
        C: CacheBackend + ?Sized,
    {
        let step = Step::new(tokens.into(), &[cache.length(0)]).expect("tokens");
        cache.begin(&step).expect("the next tokens");
        let mut residual = self
            .view(0)
            .embed(step.tokens(), step.positions())
            .expect("ids");
        for layer in 0..LAYERS {
            let (view, positions) = (self.view(layer), step.positions());
            let projection = view.project(residual.clone(), positions).expect("tokens");
            let span = Span::new(positions, &residual, &projection, &view);
            let keys_values = cache.keys_values(LayerIndex::new(layer), span);
            let keys_values = keys_values.expect("the layer is the next one");
            residual = view
                .forward(residual, positions, &keys_values)
                .expect("tokens");
        }
        cache.commit().expect("every layer was called");
        let logits = raw(linear(residual, &self.head));
        let token = VOCAB * self.dtype.size();
        logits.chunks_exact(token).map(<[u8]>::to_vec).collect()
    }

    const fn view(&self, layer: usize) -> View<'_> {
        View {
            engine: self,
            layer,
        }
    }
}

/// The engine at one layer.
struct View<'a> {
    engine: &'a Engine,
    layer: usize,
}

impl View<'_> {
    fn block(&self) -> &Block {
        &self.engine.blocks[self.layer]
    }

    fn normed(&self, residual: Tensor<3>, norm: usize) -> Tensor<3> {
        rms_norm(residual, &self.block().norms[norm], 1e-5, false)
    }

    /// Rotated by an angle of position and column, the first half of a head against the second.
    fn rotated(&self, x: Tensor<4>, positions: &Positions) -> Tensor<4> {
        let (half, dtype) = (HEAD / 2, self.engine.dtype);
        let table = |turn: fn(f64) -> f64| {
            let angles = positions.slots(0, 0).iter().flat_map(|&position| {
                let position = if position == Positions::EMPTY {
                    0
                } else {
                    position
                };
                (0..half).map(move |i| turn(position as f64 * 0.8f64.powi(i as i32)))
            });
            let data = TensorData::new(angles.collect(), [1, 1, positions.tokens(), half]);
            Tensor::<4>::from_data(data, (&x.device(), dtype))
        };
        let (cos, sin) = (table(f64::cos), table(f64::sin));
        let (one, two) = (
            x.clone().slice_dim(3, 0..half),
            x.clone().slice_dim(3, half..HEAD),
        );
        let turned = one.clone() * cos.clone() - two.clone() * sin.clone();
        Tensor::cat(vec![turned, two * cos + one * sin], 3)
    }
}

/// `[1, tokens, heads · HEAD]` as `[1, heads, tokens, HEAD]`.
fn heads(x: Tensor<3>) -> Tensor<4> {
    let [batch, tokens, width] = x.dims();
    x.reshape([batch, tokens, width / HEAD, HEAD])
        .swap_dims(1, 2)
}

impl Replay for View<'_> {
    fn embed(&self, tokens: &TokenIds, _: &Positions) -> Result<Tensor<3>, CacheError> {
        let width = tokens.longest();
        let ids: Vec<i64> = tokens.sequence(0).iter().map(|&id| i64::from(id)).collect();
        let ids = TensorData::new(ids, [width]);
        let ids = Tensor::<1, Int>::from_data(ids, &self.engine.embedding.device());
        let vectors = self.engine.embedding.clone().select(0, ids);
        Ok(vectors.reshape([1, width, HIDDEN]))
    }

    fn project(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
    ) -> Result<Projection, CacheError> {
        let both = linear(self.normed(residual, 0), &self.block().key_value);
        let width = self.engine.kv_heads * HEAD;
        let keys = heads(both.clone().slice_dim(2, 0..width));
        let values = heads(both.slice_dim(2, width..2 * width));
        let keys = self.rotated(keys, positions);
        Ok(Projection { keys, values })
    }

    fn forward(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
        keys_values: &KeysValues,
    ) -> Result<Tensor<3>, CacheError> {
        let query = linear(self.normed(residual.clone(), 0), &self.block().query);
        let mixed = attention(
            self.rotated(heads(query), positions),
            positions,
            keys_values.sequences(),
            &AttentionParams::new(1.0 / (HEAD as f64).sqrt()),
        );
        let residual = residual + linear(mixed, &self.block().output);
        let both = linear(self.normed(residual.clone(), 1), &self.block().gate_up);
        let gate = activation::silu(both.clone().slice_dim(2, 0..INNER));
        let inner = gate * both.slice_dim(2, INNER..2 * INNER);
        Ok(residual + linear(inner, &self.block().down))
    }

    fn rotate(&self, _: Tensor<4>, _: &Positions, _: &Positions) -> Result<Tensor<4>, CacheError> {
        unreachable!("only a cache that re-indexes rotates keys")
    }
}
