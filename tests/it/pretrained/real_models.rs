//! Real models, where `KV_DIRECT_MODELS` names a folder of them.

use kv_direct::{
    cache::CacheBackend,
    generate::Generation,
    planner::{Planner, Throughput},
    policy::{FullKv, Window},
    residual::ResidualConfig,
};

use crate::support::{
    caches::{CacheExt as _, PlanKind, checkpoint, residual},
    feed::feed,
    patching::{last_kl, patch},
    real_models::{GEMMA3, SMOLLM2, cases, real},
};

/// Compares up to the first step whose two best tokens are too close to distinguish.
fn assert_greedy(model: &str, test: &str) {
    let Some(loaded) = real(model, test) else {
        return;
    };
    assert!(loaded.warnings.is_empty(), "{:?}", loaded.warnings);
    for case in cases(model) {
        let mut cache = FullKv::new(&loaded.decoder.shape());
        let sure = case
            .gaps
            .iter()
            .position(|&gap| gap < 1e-3)
            .unwrap_or(case.gaps.len());
        let ids: Vec<u32> = Generation::new(&loaded.decoder, &mut cache, &case.prompt_ids)
            .expect("a prompt")
            .take(sure)
            .collect::<Result<_, _>>()
            .expect("finite logits");
        assert_eq!(
            ids,
            case.new_ids[..sure],
            "{} of {} tokens",
            case.kind,
            case.prompt_ids.len()
        );
        assert!(sure > 0, "a case that compares nothing");
    }
}

#[test]
fn greedy_tokens_of_smollm2_equal_transformers() {
    assert_greedy(SMOLLM2, "greedy_tokens_of_smollm2_equal_transformers");
}

/// One of its prompts is longer than a layer's window of 512.
#[test]
fn greedy_tokens_of_gemma_equal_transformers() {
    assert_greedy(GEMMA3, "greedy_tokens_of_gemma_equal_transformers");
}

#[test]
fn rebuilt_entries_give_the_bits_of_full_kv() {
    let Some(model) = real(SMOLLM2, "rebuilt_entries_give_the_bits_of_full_kv") else {
        return;
    };
    let decoder = &model.decoder;
    let ids: Vec<u32> = cases(SMOLLM2)
        .into_iter()
        .max_by_key(|case| case.prompt_ids.len())
        .expect("cases")
        .prompt_ids;
    let mut full = FullKv::new(&decoder.shape());
    let mut caches = [
        residual(decoder, 32, PlanKind::Tokens),
        residual(decoder, 0, PlanKind::Tokens),
        residual(decoder, 64, PlanKind::Residuals),
    ];
    let mut at = 0;
    for count in [100, 1, 1, 37, 2, 1] {
        let step = &ids[at..at + count];
        let expected = feed(decoder, &mut full, step);
        for cache in &mut caches {
            let found = feed(decoder, cache, step);
            assert_eq!(found.len(), expected.len());
            let differing = found.iter().zip(&expected).filter(|(a, b)| a != b).count();
            assert_eq!(differing, 0, "{count} tokens at {at}");
        }
        at += count;
    }
    let mut window = Window::new(&decoder.shape(), 32).expect("a budget");
    feed(decoder, &mut window, &ids[..100]);
    assert_ne!(
        feed(decoder, &mut window, &ids[100..101]),
        feed(decoder, &mut full.fork(), &ids[100..101])
    );
}

#[test]
fn residuals_of_another_prompt_give_its_output() {
    let Some(model) = real(SMOLLM2, "residuals_of_another_prompt_give_its_output") else {
        return;
    };
    let prompt = cases(SMOLLM2).remove(0).prompt_ids;
    let (recipient, donor) = (&prompt[..8], &prompt[8..16]);
    for layer in 0..model.decoder.shape().layers() {
        let (patched, expected) = patch(&model.decoder, recipient, donor, layer);
        assert!(patched == expected, "layer {layer}");
        let vocab = model.decoder.config().vocab;
        assert_eq!(last_kl(&patched, &expected, vocab), 0.0, "layer {layer}");
    }
}

/// Plans for shares of what `FullKv` holds, at lengths beyond a window of 512.
fn assert_budgets(model: &str, test: &str) {
    let Some(loaded) = real(model, test) else {
        return;
    };
    let decoder = &loaded.decoder;
    let shape = decoder.shape();
    let throughput = "read 9e9; 16 tokens: projection 5e10, block 5e10, attention 2e10; \
                  128 tokens: projection 6e10, block 6e10, attention 3e10";
    let throughput: Throughput = throughput.parse().expect("throughput");
    let planner = Planner::new(&shape, &throughput, 700)
        .expect("sizes are known")
        .with_steps_of(300);
    let (smallest, everything) = (planner.smallest(), planner.everything());
    for share in [0, 40, 80] {
        let budget = smallest + (everything - smallest) * share / 100;
        let plan = planner
            .plan(budget)
            .expect("it is not smaller than the smallest");
        let config = ResidualConfig::new(plan.clone()).with_byte_budget(budget);
        let mut ours = checkpoint(decoder, config);
        let mut full = FullKv::new(&shape);
        let ids: Vec<u32> = (0..700).map(|i| i * 97 % 40_000).collect();
        let (prompt, rest) = ids.split_at(697);
        for step in prompt.chunks(300).chain(rest.chunks(1)) {
            let [found, expected] = [
                feed(decoder, &mut ours, step),
                feed(decoder, &mut full, step),
            ];
            assert!(found == expected, "{plan} at {} tokens", full.length(0));
            let memory = ours.memory();
            assert!(
                memory.total() + memory.scratch_peak <= budget,
                "{plan}: {memory:?} of {budget}"
            );
        }
        println!(
            "{model}, {budget} bytes: {plan}, {} hot tokens; bits equal",
            plan.hot()
        );
    }
}

#[test]
fn smollm2_has_the_bits_of_full_kv_within_a_budget() {
    assert_budgets(SMOLLM2, "smollm2_has_the_bits_of_full_kv_within_a_budget");
}

#[test]
fn gemma_has_the_bits_of_full_kv_within_a_budget() {
    assert_budgets(GEMMA3, "gemma_has_the_bits_of_full_kv_within_a_budget");
}
