//! A decoder of your own on this crate's caches: `cargo run --example bring_your_own_decoder`.
//!
//! It is a GPT-2 with random weights: learned positions, LayerNorm, biases, one matrix for queries, keys and values,
//! and a KV head for every query head. `docs/using-in-your-engine.md` explains each call of a step. A decoder like this
//! needs no feature of the crate except the device's.

use anyhow::{Result, ensure};
use kv_direct::{
    CacheBackend, FullKv, H2o, ResidualCheckpoint, SnapKv, StreamingLlm, Tova, Window,
    burn::tensor::{DType, Device, Int, Tensor, TensorData, activation::gelu_approximate},
    cache::{
        CacheError, KeysValues, LayerIndex, ModelShape, Observation, Observed, Projection, Replay,
        Span, Step, TokenIds,
    },
    exact::{
        AttentionParams, Conformance, KernelShapes, Weight, attention, attention_with_column_sums,
        attention_with_last_queries, linear, rms_norm,
    },
    policy::{H2oConfig, Indexing, SnapKvConfig, StreamingLlmConfig, TovaConfig},
    positions::Positions,
    residual::Plan,
};

const VOCAB: usize = 97;
const CONTEXT: usize = 1_024;
const LAYERS: usize = 4;
const HEADS: usize = 4;
const HIDDEN: usize = 64;

struct Linear {
    weight: Weight,
    bias: Tensor<1>,
}

struct Norm {
    weight: Tensor<1>,
    bias: Tensor<1>,
}

struct Block {
    norms: [Norm; 2],
    qkv: Linear,
    output: Linear,
    up: Linear,
    down: Linear,
}

struct Gpt2 {
    embedding: Tensor<2>,
    learned: Tensor<2>,
    blocks: Vec<Block>,
    norm: Norm,
    head: Weight,
}

impl Linear {
    fn of(&self, x: Tensor<3>) -> Tensor<3> {
        linear(x, &self.weight) + self.bias.clone().unsqueeze()
    }
}

impl Norm {
    /// LayerNorm: RMSNorm of what is centred around its mean.
    fn of(&self, x: Tensor<3>) -> Tensor<3> {
        let centred = x.clone() - x.mean_dim(2);
        rms_norm(centred, &self.weight, 1e-5, false) + self.bias.clone().unsqueeze()
    }
}

impl Gpt2 {
    fn shape(&self) -> ModelShape {
        let mut kernels = KernelShapes::new(HEADS, HEADS, HIDDEN / HEADS);
        let block = &self.blocks[0];
        let linears = [&block.qkv, &block.output, &block.up, &block.down];
        kernels.linears = linears.map(|linear| linear.weight.dims()).to_vec();
        kernels.norms = vec![HIDDEN];
        let mut shape = ModelShape::new(LAYERS, HIDDEN, DType::F32, kernels);
        (shape.block.fused_qkv, shape.block.gated, shape.block.biases) = (true, false, true);
        (shape.intermediate, shape.vocab) = (Some(4 * HIDDEN), Some(VOCAB));
        shape.rotary = false;
        shape
    }

    /// The logits of every token.
    fn step(&self, tokens: TokenIds, cache: &mut dyn CacheBackend) -> Result<Tensor<3>> {
        let mut starts = cache.lengths().to_vec();
        starts.resize(tokens.sequences(), 0);
        let step = Step::new(tokens, &starts)?;
        let positions = step.positions();
        let most = places(positions).max().unwrap_or(0);
        ensure!(most < CONTEXT, "position {most} of {CONTEXT}");

        cache.begin(&step)?;
        let mut residual = At(self, 0).embed(step.tokens(), positions)?;
        for index in 0..LAYERS {
            let (layer, block) = (LayerIndex::new(index), At(self, index));
            let (queries, projection) = block.queries_and_projection(residual.clone());
            let span = Span::new(positions, &residual, &projection, &block);
            let wants = cache.wants(layer);
            let keys_values = cache.keys_values(layer, span)?;
            let (mixed, report) = block.attention(queries, positions, &keys_values, wants)?;
            drop(keys_values);
            if let Some(report) = report {
                cache.observe(layer, report)?;
            }
            residual = block.rest(residual, mixed);
        }
        cache.commit()?;
        Ok(linear(self.norm.of(residual), &self.head))
    }

    /// Measures whether this decoder repeats bits.
    fn probe(&self, device: &Device) -> Result<Conformance> {
        let text: Vec<u32> = (0..300).map(|token| token * 31 % VOCAB as u32).collect();
        Conformance::probe_decoder(&self.shape(), device, &text, |tokens, cache| {
            self.step(tokens, cache).map(drop)
        })
    }
}

/// The decoder at one layer.
struct At<'a>(&'a Gpt2, usize);

impl At<'_> {
    fn block(&self) -> &Block {
        &self.0.blocks[self.1]
    }

    fn queries_and_projection(&self, residual: Tensor<3>) -> (Tensor<4>, Projection) {
        let block = self.block();
        let all = block.qkv.of(block.norms[0].of(residual));
        let [queries, keys, values] = [0, 1, 2].map(|part| {
            let part = all.clone().slice_dim(2, part * HIDDEN..(part + 1) * HIDDEN);
            let tokens = part.dims()[1];
            part.reshape([1, tokens, HEADS, HIDDEN / HEADS])
                .swap_dims(1, 2)
        });
        (queries, Projection { keys, values })
    }

    fn attention(
        &self,
        queries: Tensor<4>,
        positions: &Positions,
        keys_values: &KeysValues,
        wants: Observation,
    ) -> Result<(Tensor<3>, Option<Observed>), CacheError> {
        let params = AttentionParams::new(1.0 / ((HIDDEN / HEADS) as f64).sqrt());
        let entries = keys_values.sequences();
        match wants {
            Observation::Nothing => Ok((attention(queries, positions, entries, &params), None)),
            Observation::ColumnSums => {
                let (mixed, sums) =
                    attention_with_column_sums(queries, positions, entries, &params);
                Ok((mixed, Some(Observed::ColumnSums(sums))))
            }
            Observation::LastQueries(count) => {
                let (mixed, rows) =
                    attention_with_last_queries(queries, positions, entries, &params, count);
                Ok((mixed, Some(Observed::LastQueries(rows))))
            }
            other => Err(CacheError::Replay(format!("no report of {other}").into())),
        }
    }

    fn rest(&self, residual: Tensor<3>, mixed: Tensor<3>) -> Tensor<3> {
        let block = self.block();
        let residual = residual + block.output.of(mixed);
        let inner = gelu_approximate(block.up.of(block.norms[1].of(residual.clone())));
        residual + block.down.of(inner)
    }
}

impl Replay for At<'_> {
    fn embed(&self, tokens: &TokenIds, positions: &Positions) -> Result<Tensor<3>, CacheError> {
        let ids = tokens.iter().flatten().map(|&id| id as usize);
        Ok(rows(&self.0.embedding, ids) + rows(&self.0.learned, places(positions)))
    }

    fn project(&self, residual: Tensor<3>, _: &Positions) -> Result<Projection, CacheError> {
        Ok(self.queries_and_projection(residual).1)
    }

    fn forward(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
        keys_values: &KeysValues,
    ) -> Result<Tensor<3>, CacheError> {
        let (queries, _) = self.queries_and_projection(residual.clone());
        let (mixed, _) = self.attention(queries, positions, keys_values, Observation::Nothing)?;
        Ok(self.rest(residual, mixed))
    }

    fn rotate(&self, _: Tensor<4>, _: &Positions, _: &Positions) -> Result<Tensor<4>, CacheError> {
        Err(CacheError::NotRotary)
    }
}

/// The position of every token; 0 for a pad, whose result nobody reads.
fn places(positions: &Positions) -> impl Iterator<Item = usize> {
    let sequences = 0..positions.sequences();
    let all = sequences.flat_map(|sequence| positions.slots(sequence, 0));
    all.map(|&position| match position {
        Positions::EMPTY => 0,
        position => position,
    })
}

/// Rows of a table: `[1, tokens, hidden]`.
fn rows(table: &Tensor<2>, at: impl Iterator<Item = usize>) -> Tensor<3> {
    let at: Vec<i64> = at.map(|index| index as i64).collect();
    let at = TensorData::new(at.clone(), [at.len()]);
    let at = Tensor::<1, Int>::from_data(at, &table.device());
    table.clone().select(0, at).unsqueeze()
}

/// A decoder with random weights.
fn random(device: &Device) -> Gpt2 {
    let mut state = 1u32;
    let mut numbers = |count: usize, spread: f32, centre: f32| -> Vec<f32> {
        let next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            centre + spread * (f32::from((state >> 16) as u16) / 32_768.0 - 1.0)
        };
        std::iter::repeat_with(next).take(count).collect()
    };
    let mut table = |rows: usize, columns: usize, spread: f32| -> Tensor<2> {
        let data = TensorData::new(numbers(rows * columns, spread, 0.0), [rows, columns]);
        Tensor::from_data(data, device)
    };
    let embedding = table(VOCAB, HIDDEN, 1.0);
    let learned = table(CONTEXT, HIDDEN, 0.3);
    let head = Weight::new(table(HIDDEN, VOCAB, 0.2));
    let mut linear = |width: usize, out: usize| Linear {
        weight: Weight::new(table(width, out, 1.5 / (width as f32).sqrt())),
        bias: table(1, out, 0.1).squeeze_dim(0),
    };
    let blocks: Vec<[Linear; 4]> = std::iter::repeat_with(|| {
        let sizes = [
            (HIDDEN, 3 * HIDDEN),
            (HIDDEN, HIDDEN),
            (HIDDEN, 4 * HIDDEN),
            (4 * HIDDEN, HIDDEN),
        ];
        sizes.map(|(width, out)| linear(width, out))
    })
    .take(LAYERS)
    .collect();
    let mut norm = || Norm {
        weight: Tensor::from_data(TensorData::new(numbers(HIDDEN, 0.2, 1.0), [HIDDEN]), device),
        bias: Tensor::from_data(TensorData::new(numbers(HIDDEN, 0.1, 0.0), [HIDDEN]), device),
    };
    let blocks = blocks.into_iter().map(|[qkv, output, up, down]| Block {
        norms: [norm(), norm()],
        qkv,
        output,
        up,
        down,
    });
    let blocks = blocks.collect();
    Gpt2 {
        embedding,
        learned,
        blocks,
        norm: norm(),
        head,
    }
}

/// All seven backends, and the residual checkpoint twice: with a residual per layer, and with token ids alone.
fn caches(
    shape: &ModelShape,
    report: &Conformance,
) -> Result<Vec<(&'static str, Box<dyn CacheBackend>)>> {
    // Keys are not rotated: `StreamingLlm` cannot re-index them, so entries keep their positions.
    let streaming = StreamingLlmConfig::new(28).with_indexing(Indexing::Original);
    let residuals = Plan::residuals(shape);
    let ids = Plan::tokens(shape).with_hot(8);
    Ok(vec![
        ("full", Box::new(FullKv::new(shape))),
        (
            "residual per layer",
            Box::new(ResidualCheckpoint::new(shape, report, residuals)?),
        ),
        (
            "token ids",
            Box::new(ResidualCheckpoint::new(shape, report, ids)?),
        ),
        ("h2o", Box::new(H2o::new(shape, H2oConfig::new(32, 16))?)),
        (
            "streaming_llm",
            Box::new(StreamingLlm::new(shape, streaming)?),
        ),
        (
            "snap_kv",
            Box::new(SnapKv::new(shape, SnapKvConfig::new(32, 8))?),
        ),
        ("tova", Box::new(Tova::new(shape, TovaConfig::new(32))?)),
        ("window", Box::new(Window::new(shape, 32)?)),
    ])
}

fn bits(logits: Tensor<3>) -> Result<Vec<u32>> {
    let numbers = logits.into_data().try_to_vec::<f32>()?;
    Ok(numbers.into_iter().map(f32::to_bits).collect())
}

/// A prompt of 80 tokens, and 40 single ones: of how many steps the logits have the bits of `FullKv`, and the bytes held.
fn compare(decoder: &Gpt2, cache: &mut dyn CacheBackend) -> Result<(usize, usize)> {
    let text: Vec<u32> = (0..120).map(|token| token * 37 % VOCAB as u32).collect();
    let mut full = FullKv::new(&decoder.shape());
    let (prompt, rest) = text.split_at(80);
    let mut equal = 0;
    for tokens in std::iter::once(prompt).chain(rest.chunks(1)) {
        let expected = bits(decoder.step(tokens.into(), &mut full)?)?;
        equal += usize::from(bits(decoder.step(tokens.into(), cache)?)? == expected);
    }
    Ok((equal, cache.memory().total()))
}

fn main() -> Result<()> {
    let device = Device::flex();
    let decoder = random(&device);
    let report = decoder.probe(&device)?;
    println!("{report}");
    for (name, mut cache) in caches(&decoder.shape(), &report)? {
        let (equal, bytes) = compare(&decoder, &mut *cache)?;
        println!("{name:<20} {equal:>3} of 41 steps with the bits of full {bytes:>9} bytes");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probed() -> (Gpt2, Conformance) {
        let device = Device::flex();
        let decoder = random(&device);
        let report = decoder.probe(&device).expect("it runs");
        (decoder, report)
    }

    #[test]
    fn the_decoder_repeats_its_bits() {
        let (_, report) = probed();
        assert!(report.is_exact() && report.covers_decoder(), "{report}");
    }

    #[test]
    fn a_residual_per_layer_halves_the_bytes_and_keeps_the_bits() {
        let (decoder, report) = probed();
        let all = caches(&decoder.shape(), &report).expect("all apply");
        let mut bytes = Vec::new();
        for (name, mut cache) in all.into_iter().take(3) {
            let (equal, _) = compare(&decoder, &mut *cache).expect("it fits");
            assert_eq!(equal, 41, "{name}");
            let held = cache.memory();
            bytes.push(held.keys_values + held.residuals);
        }
        assert_eq!(bytes[1] * 2, bytes[0]);
        assert_eq!(bytes[2], 8 * decoder.shape().keys_values_per_token());
    }

    #[test]
    fn policies_evict() {
        let (decoder, report) = probed();
        let all = caches(&decoder.shape(), &report).expect("all apply");
        for (name, mut cache) in all.into_iter().skip(3) {
            let (equal, _) = compare(&decoder, &mut *cache).expect("it fits");
            // The prompt is read before anything is evicted.
            assert!((1..41).contains(&equal), "{name}: {equal}");
            let most = if name == "snap_kv" { 32 + 40 } else { 32 };
            let held = cache.memory().keys_values;
            assert_eq!(
                held,
                most * decoder.shape().keys_values_per_token(),
                "{name}"
            );
        }
    }

    #[test]
    fn a_batch_has_the_bits_of_each_sequence_alone() {
        let (decoder, report) = probed();
        let shape = decoder.shape();
        let plan = Plan::residuals(&shape);
        let mut cache = ResidualCheckpoint::new(&shape, &report, plan).expect("a plan");
        let steps = [vec![vec![7, 8, 9], vec![4]], vec![vec![1], vec![2, 3]]];
        let mut together = [Vec::new(), Vec::new()];
        for step in &steps {
            let logits = decoder
                .step(step.clone().into(), &mut cache)
                .expect("it fits");
            let (rows, first) = (bits(logits).expect("f32"), step[0].len() * VOCAB);
            together[0].extend_from_slice(&rows[..first]);
            together[1].extend_from_slice(&rows[first..]);
        }
        for (sequence, found) in together.iter().enumerate() {
            let ids: Vec<u32> = steps
                .iter()
                .flat_map(|step| step[sequence].clone())
                .collect();
            let mut alone = FullKv::new(&shape);
            let logits = decoder
                .step((&ids[..]).into(), &mut alone)
                .expect("it fits");
            assert_eq!(&bits(logits).expect("f32"), found, "sequence {sequence}");
        }
    }

    #[test]
    fn re_indexing_is_refused_when_the_cache_is_built() {
        let (decoder, _) = probed();
        let refused = StreamingLlm::new(&decoder.shape(), StreamingLlmConfig::new(28));
        assert!(matches!(refused, Err(CacheError::NotRotary)), "{refused:?}");
    }

    #[test]
    fn a_text_beyond_the_learned_positions_changes_nothing() {
        let (decoder, _) = probed();
        let mut cache = FullKv::new(&decoder.shape());
        let text = vec![1; CONTEXT + 1];
        assert!(decoder.step((&text[..]).into(), &mut cache).is_err());
        assert!(cache.lengths().is_empty());
    }

    /// The page shows lines of this file, and no others.
    #[test]
    fn the_page_quotes_this_file() {
        let flat = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let (page, source) = (
            include_str!("../docs/using-in-your-engine.md"),
            flat(include_str!("bring_your_own_decoder.rs")),
        );
        let blocks = page.split("```rust,ignore\n").skip(1);
        let blocks: Vec<&str> = blocks.filter_map(|rest| rest.split("```").next()).collect();
        assert!(blocks.len() > 3, "{} blocks", blocks.len());
        for block in blocks {
            for part in block.split("\n\n") {
                assert!(source.contains(&flat(part)), "{part}");
            }
        }
    }
}
