//! Decoders of another crate: every kind of block, on the routines of `exact` or on stock operations of burn.

use burn::tensor::{DType, Device, Int, Tensor, TensorData, activation};
use kv_direct::{
    cache::{
        CacheBackend, CacheError, KeysValues, LayerIndex, ModelShape, Observation, Observed,
        Projection, Replay, Span, Step, TokenIds,
    },
    exact::{
        AttentionParams, Conformance, KernelShapes, Weight, attention, attention_with_column_sums,
        attention_with_last_queries, linear, rms_norm, rotate,
    },
    positions::{Positions, visible},
};

use crate::support::random::noise;

/// What tells a token its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Rotary,
    Learned,
    None,
}

/// The kind and the sizes of a decoder.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub inner: usize,
    pub layers: usize,
    pub vocab: usize,
    pub context: usize,
    pub fused: bool,
    pub gated: bool,
    pub layer_norm: bool,
    pub biases: bool,
    pub place: Place,
    /// Products, norms and attention by stock operations.
    pub stock: bool,
}

impl Kind {
    /// GPT-2.
    pub const fn gpt2(hidden: usize, heads: usize, layers: usize) -> Self {
        Self {
            hidden,
            heads,
            kv_heads: heads,
            head_dim: hidden / heads,
            inner: 4 * hidden,
            layers,
            vocab: 97,
            context: 4_096,
            fused: true,
            gated: false,
            layer_norm: true,
            biases: true,
            place: Place::Learned,
            stock: false,
        }
    }

    const fn queries(&self) -> usize {
        self.heads * self.head_dim
    }

    const fn kv(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// A weight for the routines of `exact`, and as a tensor for stock operations.
struct Linear {
    weight: Weight,
    stock: Option<Tensor<2>>,
    bias: Option<Tensor<1>>,
}

struct Norm {
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
}

struct Block {
    norms: [Norm; 2],
    /// Queries, keys and values; or queries alone.
    query: Linear,
    /// Keys and values, unless they are fused with the queries.
    key_value: Option<Linear>,
    output: Linear,
    /// Gate and up, or up alone.
    up: Linear,
    down: Linear,
}

pub struct Foreign {
    pub kind: Kind,
    embedding: Tensor<2>,
    learned: Option<Tensor<2>>,
    blocks: Vec<Block>,
    head: Linear,
}

/// Noise around `centre`.
fn random<const D: usize>(seed: u64, shape: [usize; D], centre: f64, spread: f64) -> Tensor<D> {
    let values = noise(seed).map(|x| centre + spread * x);
    let data: Vec<f64> = values.take(shape.iter().product()).collect();
    Tensor::from_data(TensorData::new(data, shape), (&Device::flex(), DType::F32))
}

impl Foreign {
    pub fn new(kind: Kind, seed: u64) -> Self {
        let mut seeds = (0..).map(|i| seed.wrapping_mul(1_000_003).wrapping_add(i));
        let mut next = || seeds.next().expect("as many as needed");
        let mut linear = |width: usize, out: usize| {
            let spread = 1.2 * (3.0 / width as f64).sqrt();
            let weight = random(next(), [width, out], 0.0, spread);
            Linear {
                stock: kind.stock.then(|| weight.clone()),
                weight: Weight::new(weight),
                bias: kind.biases.then(|| random(next(), [out], 0.0, 0.1)),
            }
        };
        let norm = |seed: u64| Norm {
            weight: random(seed, [kind.hidden], 1.0, 0.2),
            bias: kind
                .layer_norm
                .then(|| random(seed + 1, [kind.hidden], 0.0, 0.1)),
        };
        let (hidden, queries, kv) = (kind.hidden, kind.queries(), kind.kv());
        let blocks = (0..kind.layers as u64).map(|layer| Block {
            norms: [norm(seed + 10 * layer + 500), norm(seed + 10 * layer + 505)],
            query: linear(hidden, queries + if kind.fused { 2 * kv } else { 0 }),
            key_value: (!kind.fused).then(|| linear(hidden, 2 * kv)),
            output: linear(queries, hidden),
            up: linear(hidden, kind.inner * if kind.gated { 2 } else { 1 }),
            down: linear(kind.inner, hidden),
        });
        let blocks = blocks.collect();
        let head = linear(hidden, kind.vocab);
        let learned = || random(next(), [kind.context, hidden], 0.0, 0.3);
        Self {
            kind,
            learned: (kind.place == Place::Learned).then(learned),
            embedding: random(next(), [kind.vocab, hidden], 0.0, 1.0),
            blocks,
            head,
        }
    }

    pub fn shape(&self) -> ModelShape {
        let kind = &self.kind;
        let mut kernels = KernelShapes::new(kind.heads, kind.kv_heads, kind.head_dim);
        let linears = self.blocks.iter().take(1).flat_map(|block| {
            let some = [&block.query, &block.output, &block.up, &block.down];
            some.into_iter().chain(&block.key_value)
        });
        kernels.linears = linears.map(|linear| linear.weight.dims()).collect();
        kernels.norms = vec![kind.hidden];
        let mut shape = ModelShape::new(kind.layers, kind.hidden, DType::F32, kernels);
        (shape.block.fused_qkv, shape.block.gated) = (kind.fused, kind.gated);
        shape.block.biases = kind.biases;
        shape.rotary = kind.place == Place::Rotary;
        (shape.intermediate, shape.vocab) = (Some(kind.inner), Some(kind.vocab));
        shape
    }

    /// What is measured of it, with a text of so many tokens.
    pub fn conformance(&self, tokens: usize) -> Conformance {
        let text: Vec<u32> = (0..tokens as u32)
            .map(|i| i * 31 % self.kind.vocab as u32)
            .collect();
        let (shape, device) = (self.shape(), Device::flex());
        let step = |tokens, cache: &mut dyn CacheBackend| self.forward(tokens, cache).map(drop);
        Conformance::probe_decoder(&shape, &device, &text, step).expect("it runs")
    }

    pub const fn at(&self, layer: usize) -> At<'_> {
        At { model: self, layer }
    }

    /// The logits of every token of a step, the tokens of all sequences one after another.
    pub fn forward(
        &self,
        tokens: TokenIds,
        cache: &mut dyn CacheBackend,
    ) -> Result<Tensor<3>, CacheError> {
        let mut starts = cache.lengths().to_vec();
        starts.resize(tokens.sequences(), 0);
        let step = Step::new(tokens, &starts)?;
        let positions = step.positions();
        cache.begin(&step)?;
        let mut residual = self.at(0).embed(step.tokens(), positions)?;
        for layer in 0..self.kind.layers {
            let (index, at) = (LayerIndex::new(layer), self.at(layer));
            let wants = cache.wants(index);
            let (query, projection) = at.projected(&residual, positions);
            let span = Span::new(positions, &residual, &projection, &at);
            let keys_values = cache.keys_values(index, span)?;
            let (mixed, observed) = at.attend(query, positions, &keys_values, wants);
            drop(keys_values);
            if let Some(observed) = observed {
                cache.observe(index, observed)?;
            }
            residual = at.rest(residual, mixed);
        }
        cache.commit()?;
        Ok(self.product(residual, &self.head))
    }

    fn product(&self, x: Tensor<3>, by: &Linear) -> Tensor<3> {
        let y = match &by.stock {
            Some(weight) => x.matmul(weight.clone().unsqueeze()),
            None => linear(x, &by.weight),
        };
        match &by.bias {
            Some(bias) => y + bias.clone().unsqueeze(),
            None => y,
        }
    }

    fn normed(&self, x: Tensor<3>, norm: &Norm) -> Tensor<3> {
        let x = match self.kind.layer_norm {
            true => x.clone() - x.mean_dim(2),
            false => x,
        };
        let y = match self.kind.stock {
            true => {
                let variance = (x.clone() * x.clone()).mean_dim(2);
                x / (variance + 1e-5).sqrt() * norm.weight.clone().unsqueeze()
            }
            false => rms_norm(x, &norm.weight, 1e-5, false),
        };
        match &norm.bias {
            Some(bias) => y + bias.clone().unsqueeze(),
            None => y,
        }
    }

    /// Rows of a table, for indices that have one.
    fn rows(table: &Tensor<2>, indices: impl Iterator<Item = i64>) -> Tensor<3> {
        let indices: Vec<i64> = indices.collect();
        let indices = TensorData::new(indices.clone(), [indices.len()]);
        let indices = Tensor::<1, Int>::from_data(indices, &table.device());
        table.clone().select(0, indices).unsqueeze()
    }
}

/// The positions of all tokens; 0 for pads.
fn places(positions: &Positions) -> impl Iterator<Item = usize> {
    let sequences = 0..positions.sequences();
    let all = sequences.flat_map(|sequence| positions.slots(sequence, 0));
    all.map(|&position| {
        if position == Positions::EMPTY {
            0
        } else {
            position
        }
    })
}

/// The decoder at one layer.
pub struct At<'a> {
    model: &'a Foreign,
    layer: usize,
}

impl At<'_> {
    fn block(&self) -> &Block {
        &self.model.blocks[self.layer]
    }

    /// `[1, tokens, heads · head_dim]` as `[1, heads, tokens, head_dim]`.
    fn heads(&self, x: Tensor<3>) -> Tensor<4> {
        let ([_, tokens, width], head) = (x.dims(), self.model.kind.head_dim);
        x.reshape([1, tokens, width / head, head]).swap_dims(1, 2)
    }

    fn placed(&self, x: Tensor<4>, positions: &Positions) -> Tensor<4> {
        if self.model.kind.place != Place::Rotary {
            return x;
        }
        let half = self.model.kind.head_dim / 2;
        let table = |turn: fn(f64) -> f64| {
            let angles = places(positions).flat_map(|position| {
                (0..half).map(move |i| turn(position as f64 * 0.8f64.powi(i as i32)))
            });
            let data = TensorData::new(
                angles.collect::<Vec<f64>>(),
                [1, 1, positions.tokens(), half],
            );
            Tensor::<4>::from_data(data, (&x.device(), DType::F32))
        };
        let (cos, sin) = (table(f64::cos), table(f64::sin));
        rotate(x, &cos, &sin)
    }

    /// Keys and values from `[1, tokens, ..]`, beginning at this column.
    fn entries(&self, both: &Tensor<3>, from: usize, positions: &Positions) -> Projection {
        let kv = self.model.kind.kv();
        let part = |from: usize| self.heads(both.clone().slice_dim(2, from..from + kv));
        Projection {
            keys: self.placed(part(from), positions),
            values: part(from + kv),
        }
    }

    fn projected(&self, residual: &Tensor<3>, positions: &Positions) -> (Tensor<4>, Projection) {
        let (model, block) = (self.model, self.block());
        let x = model.normed(residual.clone(), &block.norms[0]);
        let queries = model.kind.queries();
        let first = model.product(x.clone(), &block.query);
        let projection = match &block.key_value {
            Some(key_value) => self.entries(&model.product(x, key_value), 0, positions),
            None => self.entries(&first, queries, positions),
        };
        let query = self.heads(first.slice_dim(2, 0..queries));
        (self.placed(query, positions), projection)
    }

    fn attend(
        &self,
        query: Tensor<4>,
        positions: &Positions,
        keys_values: &KeysValues,
        wants: Observation,
    ) -> (Tensor<3>, Option<Observed>) {
        let params = AttentionParams::new(1.0 / (self.model.kind.head_dim as f64).sqrt());
        let segments = keys_values.sequences();
        match wants {
            Observation::ColumnSums => {
                let (mixed, sums) = attention_with_column_sums(query, positions, segments, &params);
                (mixed, Some(Observed::ColumnSums(sums)))
            }
            Observation::LastQueries(last) => {
                let (mixed, rows) =
                    attention_with_last_queries(query, positions, segments, &params, last);
                (mixed, Some(Observed::LastQueries(rows)))
            }
            _ if self.model.kind.stock => {
                (self.stock_attention(query, positions, keys_values), None)
            }
            _ => (attention(query, positions, segments, &params), None),
        }
    }

    /// Softmax over the scores of all slots, sequence by sequence.
    fn stock_attention(
        &self,
        query: Tensor<4>,
        positions: &Positions,
        keys_values: &KeysValues,
    ) -> Tensor<3> {
        let kind = &self.model.kind;
        let mixed = (0..positions.sequences()).filter(|&i| !positions.rows(i).is_empty());
        let mixed = mixed.map(|sequence| {
            let mut at: Vec<usize> = Vec::new();
            let (mut keys, mut values) = (Vec::new(), Vec::new());
            for segment in keys_values.segments(sequence) {
                // The number of free slots at the end says nothing of the text.
                let used = |&position: &usize| position != Positions::EMPTY;
                let all = segment.positions(0);
                let slots = all.iter().rposition(used).map_or(0, |last| last + 1);
                at.extend(&all[..slots]);
                keys.push(segment.key_rows().slice_dim(1, 0..slots));
                values.push(segment.values().clone().slice_dim(1, 0..slots));
            }
            let repeated = |parts| {
                let all: Tensor<3> = Tensor::cat(parts, 1);
                let [heads, slots, width] = all.dims();
                let all = all.unsqueeze_dim::<4>(1);
                let all = all.repeat_dim(1, kind.heads / kind.kv_heads);
                all.reshape([1, heads * (kind.heads / kind.kv_heads), slots, width])
            };
            let (keys, values) = (repeated(keys), repeated(values));
            let rows = positions.slots(sequence, 0);
            let seen = |query: usize, key: usize| {
                key != Positions::EMPTY && query != Positions::EMPTY && visible(query, key, None)
            };
            let mask = rows.iter().flat_map(|&query| {
                let at = &at;
                at.iter()
                    .map(move |&key| if seen(query, key) { 0.0f32 } else { -1e30 })
            });
            let mask = TensorData::new(mask.collect::<Vec<f32>>(), [1, 1, rows.len(), at.len()]);
            let mask: Tensor<4> = Tensor::from_data(mask, &query.device());
            let query = query.clone().slice_dim(2, positions.rows(sequence));
            let scale = 1.0 / (kind.head_dim as f64).sqrt();
            let scores = query.matmul(keys.transpose()) * scale + mask;
            activation::softmax(scores, 3).matmul(values)
        });
        let mixed = Tensor::cat(mixed.collect(), 2);
        let tokens = mixed.dims()[2];
        mixed.swap_dims(1, 2).reshape([1, tokens, kind.queries()])
    }

    fn rest(&self, residual: Tensor<3>, mixed: Tensor<3>) -> Tensor<3> {
        let (model, block) = (self.model, self.block());
        let residual = residual + model.product(mixed, &block.output);
        let up = model.product(model.normed(residual.clone(), &block.norms[1]), &block.up);
        let inner = model.kind.inner;
        let inner = match model.kind.gated {
            true => {
                let gate = activation::silu(up.clone().slice_dim(2, 0..inner));
                gate * up.slice_dim(2, inner..2 * inner)
            }
            false => activation::gelu_approximate(up),
        };
        residual + model.product(inner, &block.down)
    }
}

impl Replay for At<'_> {
    fn embed(&self, tokens: &TokenIds, positions: &Positions) -> Result<Tensor<3>, CacheError> {
        let ids = tokens.iter().flatten().map(|&id| i64::from(id));
        let embedded = Foreign::rows(&self.model.embedding, ids);
        Ok(match &self.model.learned {
            Some(learned) => {
                embedded + Foreign::rows(learned, places(positions).map(|place| place as i64))
            }
            None => embedded,
        })
    }

    fn project(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
    ) -> Result<Projection, CacheError> {
        let (model, block) = (self.model, self.block());
        match &block.key_value {
            Some(key_value) => {
                let x = model.normed(residual, &block.norms[0]);
                Ok(self.entries(&model.product(x, key_value), 0, positions))
            }
            None => Ok(self.projected(&residual, positions).1),
        }
    }

    fn forward(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
        keys_values: &KeysValues,
    ) -> Result<Tensor<3>, CacheError> {
        let (model, block) = (self.model, self.block());
        let x = model.normed(residual.clone(), &block.norms[0]);
        let query = model.product(x, &block.query);
        let query = self.heads(query.slice_dim(2, 0..model.kind.queries()));
        let query = self.placed(query, positions);
        let (mixed, _) = self.attend(query, positions, keys_values, Observation::Nothing);
        Ok(self.rest(residual, mixed))
    }

    fn rotate(
        &self,
        keys: Tensor<4>,
        from: &Positions,
        to: &Positions,
    ) -> Result<Tensor<4>, CacheError> {
        if self.model.kind.place != Place::Rotary {
            return Err(CacheError::Replay("keys are not rotated".into()));
        }
        let by = places(to).zip(places(from)).map(|(to, from)| to - from);
        Ok(self.placed(keys, &Positions::shared(&[by.collect::<Vec<_>>()])))
    }
}
