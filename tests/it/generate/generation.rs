//! How a generation samples, and how it ends.

use std::sync::{Arc, mpsc};

use burn::tensor::Device;
use kv_direct::{
    cache::{CacheBackend, CacheError, Step},
    forward_backend,
    generate::{Cancel, FinishReason, GenerateError, Generation, Sampling, argmax},
    model::{Decoder, DecoderConfig, Input},
    policy::{FullKv, Window},
};

use crate::support::{
    caches::{CacheExt as _, backends},
    draws::at_temperature_one,
    models::tiny,
    random::tokens,
};

#[test]
fn sampled_ids_do_not_depend_on_cache_or_chunks() {
    let decoder = tiny(2);
    let prompt = tokens(4, 20);
    let sampling = at_temperature_one()
        .with_top_p(0.9)
        .and_then(|s| s.with_repetition_penalty(1.2));
    let sampling = sampling.expect("in range").with_seed(11);
    let generate = |cache: &mut dyn CacheBackend, chunk| -> Vec<u32> {
        let generation = Generation::new(&decoder, cache, &prompt).expect("a prompt");
        let generation = generation.with_sampling(sampling.clone()).with_max_new(24);
        let ids = generation.with_chunks(chunk).collect::<Result<_, _>>();
        ids.expect("finite logits")
    };
    let expected = generate(&mut FullKv::new(&decoder.shape()), 20);
    let distinct: std::collections::HashSet<_> = expected.iter().collect();
    assert!(distinct.len() > 3, "{expected:?} hardly tests anything");
    for (name, mut cache) in backends(&decoder) {
        let lossless = name != "Window";
        for chunk in [20, 7, 1] {
            cache.clear();
            let found = generate(&mut *cache, chunk);
            assert_eq!(found == expected, lossless, "{name}, chunks of {chunk}");
        }
    }
}

#[test]
fn a_maximum_of_zero_feeds_nothing() {
    let decoder = tiny(2);
    let mut cache = FullKv::new(&decoder.shape());
    let generation = Generation::new(&decoder, &mut cache, &[1, 2]).expect("a prompt");
    let mut generation = generation.with_max_new(0);
    assert!(generation.next().is_none());
    assert_eq!(generation.finish_reason(), Some(FinishReason::Length));
    assert_eq!(cache.length(0), 0);
}

#[test]
fn the_finish_reason_is_returned_and_the_last_id_not_fed() {
    fn start<'a>(
        decoder: &'a Decoder,
        cache: &'a mut FullKv,
    ) -> Generation<&'a Decoder, &'a mut FullKv> {
        let generation = Generation::new(decoder, cache, &[1, 2]).expect("a prompt");
        generation.with_sampling(at_temperature_one().with_seed(5))
    }
    let decoder = tiny(2);
    let mut cache = FullKv::new(&decoder.shape());
    let mut generation = start(&decoder, &mut cache).with_max_new(6);
    let mut ids = Vec::new();
    while ids.len() < 6 {
        assert_eq!(generation.finish_reason(), None);
        ids.push(generation.next().expect("running").expect("finite"));
    }
    assert_eq!(generation.finish_reason(), Some(FinishReason::Length));
    assert!(generation.next().is_none());
    assert_eq!(cache.length(0), 2 + 5);

    // The same run again, ended by its last id: that is the reason, also where it is the last that may come.
    assert!(!ids[..5].contains(&ids[5]), "{ids:?}");
    for most in [6, 7] {
        cache.clear();
        let eos = [96, ids[5]];
        let mut generation = start(&decoder, &mut cache)
            .with_eos(&eos)
            .with_max_new(most);
        let again: Vec<u32> = generation
            .by_ref()
            .collect::<Result<_, _>>()
            .expect("finite");
        assert_eq!(again, ids);
        assert_eq!(
            generation.finish_reason(),
            Some(FinishReason::EndOfText(ids[5]))
        );
    }
}

#[test]
fn an_error_ends_it_without_a_finish_reason() {
    let decoder = tiny(2);
    let mut cache = Window::new(&decoder.shape(), 4).expect("a budget");
    let mut generation = Generation::new(&decoder, &mut cache, &[97]).expect("a prompt");
    let error = generation.next().expect("one item");
    assert!(matches!(error, Err(GenerateError::Forward(_))), "{error:?}");
    assert!(generation.next().is_none());
    assert_eq!(generation.finish_reason(), None);
}

#[test]
fn ids_of_the_history_count_as_seen() {
    let decoder = tiny(2);
    let penalty = Sampling::new().with_repetition_penalty(50.0);
    let penalty = penalty.expect("in range");
    let mut cache = FullKv::new(&decoder.shape());
    let prompt = tokens(9, 40);
    let mut whole = Generation::new(&decoder, &mut cache, &prompt)
        .expect("a prompt")
        .with_sampling(penalty.clone());
    let expected = whole.next().expect("one").expect("finite");
    cache.truncate_all(39).expect("back");
    let mut next = |history: &[u32]| {
        let generation = Generation::new(&decoder, &mut cache, &prompt[39..]);
        let generation = generation.expect("a prompt").with_history(history);
        let id = generation.with_sampling(penalty.clone()).next();
        cache.truncate_all(39).expect("back");
        id.expect("one").expect("finite")
    };
    assert_eq!(next(&prompt[..39]), expected);
    // It matters: an id that was seen is not chosen again.
    let first = next(&[]);
    assert_ne!(next(&[first]), first);
}

#[test]
fn logits_that_are_not_finite_give_no_token() {
    let decoder = Decoder::from_weights(
        DecoderConfig::new(97, 64, 1, 4, 2),
        &Device::flex(),
        |name, shape| {
            let weight = if name == "final_norm" { f32::NAN } else { 0.5 };
            Ok::<_, std::convert::Infallible>(vec![weight; shape.iter().product()])
        },
    )
    .expect("a good configuration");
    let mut cache = FullKv::new(&decoder.shape());
    let next = Generation::new(&decoder, &mut cache, &[1])
        .expect("a prompt")
        .next();
    assert!(
        matches!(next, Some(Err(GenerateError::NotFinite { position: 1 }))),
        "{next:?}"
    );
}

/// Asks at every step whether it may begin.
#[derive(Debug)]
struct Asking {
    inner: FullKv,
    steps: mpsc::Sender<usize>,
    go_on: mpsc::Receiver<()>,
}

impl CacheBackend for Asking {
    fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
        let tokens = step.positions().tokens();
        self.steps.send(tokens).expect("somebody listens");
        self.go_on.recv().expect("somebody answers");
        self.inner.begin(step)
    }

    forward_backend!(self => self.inner; keys_values wants observe commit queries lifecycle clear fork);
}

#[test]
fn a_long_prompt_is_cancelled_from_another_thread_between_chunks() {
    let decoder = Arc::new(tiny(2));
    let (steps, begun) = mpsc::channel();
    let (go, go_on) = mpsc::channel();
    let inner = FullKv::new(&decoder.shape());
    let cache = Asking {
        inner,
        steps,
        go_on,
    };
    let (cancel, prompt) = (Cancel::new(), tokens(5, 500));
    let generation = Generation::new(Arc::clone(&decoder), cache, &prompt).expect("a prompt");
    let mut generation = generation.with_chunks(20).with_cancel(&cancel);
    let running = std::thread::spawn(move || {
        let next = generation.next();
        assert!(next.is_none() && generation.next().is_none(), "{next:?}");
        generation
    });
    for step in 0..3 {
        assert_eq!(begun.recv(), Ok(20));
        if step == 2 {
            cancel.cancel();
        }
        go.send(()).expect("it waits");
    }
    let generation = running.join().expect("no panic");
    assert_eq!(generation.finish_reason(), Some(FinishReason::Cancelled));
    assert!(generation.logits().is_empty());
    // What was processed is whole chunks, and goes on with the bits of a cache that was never cancelled.
    let mut cache = generation.into_cache().inner;
    assert_eq!(cache.lengths(), [60]);
    let rest = Generation::new(&*decoder, &mut cache, &prompt[60..]).expect("a prompt");
    let found: Vec<u32> = rest.take(4).collect::<Result<_, _>>().expect("finite");
    let all = Generation::new(&*decoder, FullKv::new(&decoder.shape()), &prompt);
    let expected = all
        .expect("a prompt")
        .take(4)
        .collect::<Result<Vec<_>, _>>();
    assert_eq!(found, expected.expect("finite"));
}

#[test]
fn the_logits_of_each_id_are_there() {
    let decoder = tiny(2);
    let mut generation =
        Generation::new(&decoder, FullKv::new(&decoder.shape()), &[1, 2, 3]).expect("a prompt");
    assert!(generation.logits().is_empty());
    let mut text = vec![1, 2, 3];
    for _ in 0..5 {
        let id = generation.next().expect("no end").expect("finite");
        let mut cache = FullKv::new(&decoder.shape());
        let input = Input::from(&text[..]).last_only();
        let expected = decoder.forward(input, &mut cache).expect("it fits");
        let expected: Vec<f32> = expected.try_into_vec_as().expect("f32");
        assert_eq!(generation.logits(), expected);
        assert_eq!(argmax(generation.logits()), Some(id));
        text.push(id);
    }
    assert_eq!(generation.cache().lengths(), [7]);
}
