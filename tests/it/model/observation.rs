//! What attention hands to a backend: column sums, and rotations to other positions.

use std::sync::{Arc, Mutex};

use burn::tensor::Tensor;
use kv_direct::{
    cache::{CacheBackend, CacheError, KeysValues, LayerIndex, Observation, Observed, Span, Step},
    exact::PANEL,
    model::Decoder,
    policy::{FullKv, H2o, H2oConfig},
    positions::Positions,
};

use crate::support::{
    feed::{apart, feed, floats},
    models::{LLAMA3, YARN, config, random_decoder, scaled, tiny},
    random::tokens,
};

/// A `FullKv` that wants column sums and stores them. It also compares keys rotated by `shift` with keys
/// projected there.
#[derive(Debug)]
struct Watcher {
    inner: FullKv,
    shift: usize,
    sums: Arc<Mutex<Vec<Vec<f32>>>>,
}

impl CacheBackend for Watcher {
    fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
        self.inner.begin(step)
    }

    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        let here = span.positions;
        let there = self.moved(here);
        // The same keys, rotated to the new positions or projected there.
        let turned = span
            .replay
            .rotate(span.projection.keys.clone(), here, &there)?;
        let fresh = span.replay.project(span.residual.clone(), &there)?.keys;
        let off = apart(&floats(&turned), floats(&fresh).into_iter().map(f64::from));
        assert!(off < 1e-4, "two rotations in f32 against one, off by {off}");
        let back = span.replay.rotate(turned, &there, here)?;
        let off = apart(
            &floats(&back),
            floats(&span.projection.keys).into_iter().map(f64::from),
        );
        assert!(off < 1e-4, "there and back, off by {off}");

        self.inner.keys_values(layer, span)
    }

    fn wants(&self, _: LayerIndex) -> Observation {
        Observation::ColumnSums
    }

    fn observe(&mut self, _: LayerIndex, seen: Observed) -> Result<(), CacheError> {
        let Observed::ColumnSums(sums) = seen else {
            panic!("column sums were wanted")
        };
        self.sums
            .lock()
            .expect("no other thread panics")
            .push(floats(&sums));
        Ok(())
    }

    kv_direct::forward_backend!(self => self.inner; commit queries lifecycle clear fork);
}

impl Watcher {
    fn new(decoder: &Decoder, shift: usize) -> Self {
        Self {
            inner: FullKv::new(&decoder.shape()),
            shift,
            sums: Arc::default(),
        }
    }

    fn moved(&self, positions: &Positions) -> Positions {
        let sequences: Vec<Vec<usize>> = (0..positions.sequences())
            .map(|sequence| {
                let shift = |&p: &usize| {
                    if p == Positions::EMPTY {
                        p
                    } else {
                        p + self.shift
                    }
                };
                positions.slots(sequence, 0).iter().map(shift).collect()
            })
            .collect();
        Positions::shared(&sequences)
    }
}

#[test]
fn rotated_keys_equal_keys_projected_at_the_new_positions() {
    for config in [config(4, 2), scaled(LLAMA3), scaled(YARN)] {
        let decoder = random_decoder(&config);
        let mut cache = Watcher::new(&decoder, 700);
        for step in [&tokens(1, 30)[..], &tokens(2, 1), &tokens(3, 7)] {
            decoder.forward(step, &mut cache).expect("a valid step");
        }
        assert_eq!(cache.lengths(), [38]);
    }
}

#[test]
fn a_backend_receives_the_column_sums_it_wants_at_every_layer() {
    let decoder = tiny(2);
    let (mut plain, mut watcher) = (FullKv::new(&decoder.shape()), Watcher::new(&decoder, 0));
    let step = vec![tokens(1, 9), tokens(2, 4)];
    assert_eq!(
        feed(&decoder, &mut plain, step.clone()).len(),
        feed(&decoder, &mut watcher, step).len()
    );
    let sums = watcher.sums.lock().expect("no other thread panics");
    assert_eq!(sums.len(), 3);
    for sums in sums.iter() {
        for (index, head) in sums.chunks(PANEL).enumerate() {
            let queries = if index < 4 { 9.0 } else { 4.0 };
            assert!(
                (head.iter().sum::<f32>() - queries).abs() < 1e-5,
                "every real query adds 1"
            );
            assert!(
                head[queries as usize..].iter().all(|&sum| sum == 0.0),
                "free slots receive nothing"
            );
        }
    }
}

#[test]
fn attention_is_accepted_only_for_the_layer_just_read() {
    let decoder = tiny(2);
    let mut cache = H2o::new(&decoder.shape(), H2oConfig::new(8, 4)).expect("fits");
    let sums = || Observed::ColumnSums(Tensor::zeros([1, 4, PANEL], decoder.device()));
    let early = cache.observe(LayerIndex::new(0), sums());
    assert!(
        matches!(
            early,
            Err(CacheError::LayerOrder {
                expected: None,
                found: 0
            })
        ),
        "{early:?}"
    );
    feed(&decoder, &mut cache, &tokens(1, 20)[..]);
    let cached = cache.cached(LayerIndex::new(0));
    assert!(
        cache.observe(LayerIndex::new(0), sums()).is_err(),
        "no step is open"
    );
    assert_eq!(cache.cached(LayerIndex::new(0)), cached);
    let step = Step::new(vec![vec![1]].into(), &[20]).expect("a step");
    cache.begin(&step).expect("the next step");
    assert!(
        cache.observe(LayerIndex::new(2), sums()).is_err(),
        "no layer was called"
    );
    assert!(matches!(cache.commit(), Err(CacheError::Poisoned)));
}
