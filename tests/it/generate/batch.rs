//! Several sequences together: each has the ids that it has alone.

use kv_direct::{
    cache::CacheBackend,
    generate::{BatchGeneration, Cancel, FinishReason, GenerateError, Generation, Sampling},
    policy::FullKv,
};

use crate::support::{
    caches::{CacheExt as _, backends},
    models::tiny,
    random::tokens,
};

fn sampling(seed: usize) -> Sampling {
    let sampling = Sampling::new().with_temperature(1.0).expect("in range");
    sampling.with_seed(seed as u64)
}

#[test]
fn sequences_have_the_ids_that_they_have_alone() {
    let decoder = tiny(2);
    let prompts = [tokens(1, 17), tokens(2, 1), tokens(3, 40)];
    for (name, mut cache) in backends(&decoder) {
        let mut alone = Vec::new();
        for (index, prompt) in prompts.iter().enumerate() {
            let ids = Generation::new(&decoder, &mut *cache, prompt).expect("a prompt");
            let ids = ids.with_sampling(sampling(index)).with_max_new(20);
            alone.push(ids.collect::<Result<Vec<u32>, _>>().expect("finite"));
            cache.clear();
        }
        // The second ends early, at an id of its own.
        let eos = alone[1]
            .iter()
            .find(|&id| !alone[0].contains(id) && !alone[2].contains(id));
        let eos = *eos.expect("an id of its own");
        let ends = alone[1]
            .iter()
            .position(|&id| id == eos)
            .expect("it is there");
        alone[1].truncate(ends + 1);
        let batch = BatchGeneration::new(&decoder, &mut *cache, &prompts).expect("prompts");
        let mut batch = batch
            .with_sampling(sampling)
            .with_max_new(20)
            .with_eos(&[eos]);
        let mut found = vec![Vec::new(); 3];
        for step in batch.by_ref() {
            for (found, id) in found.iter_mut().zip(step.expect("finite")) {
                found.extend(id);
            }
        }
        assert_eq!(found, alone, "{name}");
        assert_eq!(batch.finish_reason(0), Some(FinishReason::Length));
        assert_eq!(batch.finish_reason(1), Some(FinishReason::EndOfText(eos)));
        assert_eq!(batch.logits(2).len(), 97);
        let lengths = [17 + 19, 1 + ends, 40 + 19];
        assert_eq!(batch.into_cache().lengths(), lengths, "{name}");
    }
}

#[test]
fn a_batch_is_cancelled_and_refuses_empty_prompts() {
    let decoder = tiny(2);
    let mut cache = FullKv::new(&decoder.shape());
    for prompts in [&[][..], &[vec![1], vec![]]] {
        let refused = BatchGeneration::new(&decoder, &mut cache, prompts);
        assert!(matches!(refused, Err(GenerateError::EmptyPrompt)));
    }
    let cancel = Cancel::new();
    let prompts = [vec![1, 2], vec![3]];
    let batch = BatchGeneration::new(&decoder, &mut cache, &prompts).expect("prompts");
    let mut batch = batch.with_cancel(&cancel);
    assert!(batch.next().is_some_and(|step| step.is_ok()));
    cancel.cancel();
    assert!(batch.next().is_none());
    assert_eq!(batch.finish_reason(1), Some(FinishReason::Cancelled));
    assert_eq!(cache.length(1), 1);
}
