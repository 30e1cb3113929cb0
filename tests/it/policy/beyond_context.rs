//! A re-indexed cache goes on beyond the context of the model; the others end there.

use kv_direct::{
    Decoder,
    burn::tensor::Tensor,
    cache::{CacheBackend, LayerIndex, Replay},
    model::{ForwardError, RopeConfig},
    policy::{FullKv, Indexing, StreamingLlm, StreamingLlmConfig, Window},
    positions::Positions,
};

use crate::support::{
    models::{TOLERANCE, config, random_decoder},
    random::tokens,
};

const CONTEXT: usize = 96;

fn with_context(max_positions: usize) -> Decoder {
    let mut config = config(4, 2);
    config.max_positions = max_positions;
    random_decoder(&config)
}

fn streaming(decoder: &Decoder, indexing: Indexing) -> StreamingLlm {
    let config = StreamingLlmConfig::new(28).with_indexing(indexing);
    StreamingLlm::new(&decoder.shape(), config).expect("a budget of 32")
}

#[test]
fn re_indexed_entries_need_positions_of_the_budget_alone() {
    let (short, long) = (with_context(CONTEXT), with_context(4_096));
    let mut caches = [&short, &long].map(|decoder| streaming(decoder, Indexing::CacheIndex));
    let text = tokens(1, 3_000);
    for (index, chunk) in text.chunks(CONTEXT - 32).enumerate() {
        let [found, expected] = [(&short, 0), (&long, 1)].map(|(decoder, cache)| {
            let logits = decoder.forward(chunk, &mut caches[cache]);
            let logits = logits.expect("32 entries and 64 tokens fit");
            logits.into_data().try_into_vec::<f32>().expect("f32")
        });
        // Angles beyond the context are not rounded to f32: other bits, the same function.
        let differs = |(a, b): (&f32, &f32)| f64::from((a - b).abs()) > 10.0 * TOLERANCE;
        let differing = found.iter().zip(&expected).filter(|&pair| differs(pair));
        assert_eq!(differing.count(), 0, "chunk {index}");
    }
    assert_eq!(caches[0].lengths(), [3_000]);
    assert_eq!(caches[0].reach(), [32]);
}

#[test]
fn a_step_that_reads_further_than_the_context_is_refused() {
    let decoder = with_context(CONTEXT);
    let mut cache = streaming(&decoder, Indexing::CacheIndex);
    let refused = |tokens: usize, cache: &mut dyn CacheBackend| {
        let lengths = cache.lengths().to_vec();
        let found = decoder.forward(&vec![1; tokens][..], cache);
        let full = matches!(
            found,
            Err(ForwardError::ContextFull {
                position: CONTEXT,
                max_positions: CONTEXT
            })
        );
        full && cache.lengths() == lengths
    };
    assert!(refused(CONTEXT + 1, &mut cache));
    for _ in 0..3 {
        decoder.forward(&[1; 64][..], &mut cache).expect("it fits");
        assert!(refused(CONTEXT + 1 - 32, &mut cache));
    }
    let mut others: [Box<dyn CacheBackend>; 3] = [
        Box::new(FullKv::new(&decoder.shape())),
        Box::new(Window::new(&decoder.shape(), 32).expect("a window")),
        Box::new(streaming(&decoder, Indexing::Original)),
    ];
    for cache in &mut others {
        decoder.forward(&[1; 64][..], cache).expect("it fits");
        assert!(refused(CONTEXT + 1 - 64, cache), "{cache:?}");
    }
}

#[test]
fn distances_are_exact_at_far_positions() {
    let mut config = config(4, 2);
    config.max_positions = CONTEXT;
    for layer in &mut config.layers {
        layer.rope = RopeConfig::new(1e4);
    }
    let (kv_heads, head_dim) = (config.kv_heads, config.head_dim);
    let decoder = random_decoder(&config);
    let device = decoder.device();
    let first = decoder.at(LayerIndex::new(0));
    let key: Vec<f32> = (0..kv_heads * head_dim).map(|i| (i as f32).sin()).collect();
    let key = Tensor::<1>::from_floats(&key[..], device).reshape([1, kv_heads, 1, head_dim]);
    let at = |position: usize| {
        let [from, to] = [0, position].map(|start| Positions::contiguous(&[start], &[1]));
        first.rotate(key.clone(), &from, &to).expect("no limit")
    };
    let product = |a, b| (at(a) * at(b)).sum().into_scalar::<f32>();
    let near = product(0, 13);
    for far in [CONTEXT, 10_000, 1 << 20, 1 << 30, 1 << 40] {
        let found = product(far, far + 13);
        assert!((found - near).abs() < 1e-4, "{far}: {found}, not {near}");
    }
}
