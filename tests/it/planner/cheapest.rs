//! The planner against every plan there is.

use std::num::NonZeroUsize;

use burn::tensor::DType;
use kv_direct::{
    cache::{CacheError, ModelShape},
    exact::KernelShapes,
    model::DecoderConfig,
    planner::{Planner, Throughput},
    residual::{Plan, Retain},
};
use proptest::prelude::*;

use crate::support::{cases, plans::throughput};

/// Models of five layers. Keys and values together are as wide as the residual, each is as wide, or they are
/// wider. Some have sliding-window layers.
fn shapes() -> Vec<ModelShape> {
    let shape = |heads, kv_heads, windows: &[usize]| {
        let kernels = KernelShapes::new(heads, kv_heads, 16);
        let mut shape = ModelShape::new(5, 64, DType::F32, kernels);
        (shape.intermediate, shape.vocab) = (Some(160), Some(97));
        for &layer in windows {
            shape.windows[layer] = NonZeroUsize::new(100);
        }
        shape
    };
    vec![
        shape(4, 2, &[]),
        shape(4, 4, &[]),
        shape(8, 8, &[]),
        shape(8, 1, &[]),
        shape(4, 2, &[0, 2, 3]),
        shape(8, 8, &[1, 3]),
        shape(4, 4, &[4]),
        shape(8, 8, &[0, 1, 2, 3, 4]),
    ]
}

/// All plans that a cache accepts, useful or not, without residuals in sliding-window layers. There residuals
/// save only the scratch of a replay after parking.
fn every_plan(shape: &ModelShape) -> Vec<Plan> {
    let kinds = [Retain::KeysValues, Retain::Residual, Retain::Nothing];
    let count = 3_usize.pow(shape.layers() as u32);
    let layers = (0..count).map(|mut number| {
        let mut layer = |_| {
            let kind = kinds[number % 3];
            number /= 3;
            kind
        };
        (0..shape.layers()).map(&mut layer).collect::<Vec<_>>()
    });
    let plan = |layers: Vec<Retain>| {
        let mut both = layers.iter().zip(&shape.windows);
        let odd = both.any(|(old, window)| window.is_some() && *old == Retain::Residual);
        let residuals = layers.contains(&Retain::Residual);
        let taken = |plan: &Plan| {
            let bytes = plan.bytes_per_old_token(shape);
            !residuals || bytes < shape.keys_values_per_old_token()
        };
        let plan = Plan::new(shape, layers).ok().filter(|_| !odd);
        plan.filter(taken)
    };
    layers.filter_map(plan).collect()
}

/// The predicted time of a plan with as many hot tokens as the budget has room for, `None` where it has none.
/// Not all tokens are hot: a replay of parked entries needs room.
fn seconds(
    planner: &Planner<'_>,
    plan: &Plan,
    throughput: &Throughput,
    (context, budget): (usize, usize),
) -> Option<f64> {
    let priced = |hot: usize| planner.cost(&plan.clone().with_hot(hot));
    let hots: Vec<usize> = (0..context).collect();
    let fitting = hots.partition_point(|&hot| priced(hot).expect("a cost").peak() <= budget);
    let hot = fitting.checked_sub(1)?;
    Some(priced(hot).expect("a cost").seconds(throughput))
}

fn rate() -> impl Strategy<Value = f64> {
    (9.0..11.5).prop_map(|digits: f64| 10f64.powf(digits))
}

/// Throughputs of two chunks, as text.
fn rates() -> impl Strategy<Value = String> {
    let chunk = |tokens: usize| {
        let rates = (rate(), rate(), rate());
        rates.prop_map(move |(projection, block, attention)| {
            format!(
                "; {tokens} tokens: projection {projection:e}, block {block:e}, attention {attention:e}"
            )
        })
    };
    (rate(), chunk(16), chunk(64)).prop_map(|(read, few, many)| format!("read {read:e}{few}{many}"))
}

fn check(
    count: u32,
    mut of: impl FnMut(&ModelShape, &Throughput, usize, f64) -> Result<(), TestCaseError>,
) {
    let shapes = shapes();
    let strategy = (0..shapes.len(), rates(), 2_usize..3_000, 0.0..1.1);
    let of = std::cell::RefCell::new(&mut of);
    cases::check(
        cases::runner(count),
        &strategy,
        |(shape, rates, context, share)| {
            let throughput = rates.parse().expect("throughputs of two chunks");
            (of.borrow_mut())(&shapes[shape], &throughput, context, share)
        },
    );
}

fn most(shape: &ModelShape, planner: &Planner<'_>) -> usize {
    let all = Plan::retain_top(shape, shape.layers()).expect("as many layers");
    planner.cost(&all).expect("a cost").peak()
}

#[test]
fn no_plan_within_the_budget_is_faster() {
    check(128, |shape, throughput, context, share| {
        // Steps of one token: a budget then has to hold the cost of a step, and no more.
        let planner = Planner::new(shape, throughput, context)
            .expect("sizes are known")
            .with_steps_of(1);
        let smallest = planner.smallest();
        let room = most(shape, &planner).saturating_sub(smallest);
        let budget = smallest + (room as f64 * share) as usize;
        let plan = planner.plan(budget).expect("no less than the smallest");
        let price = planner.cost(&plan).expect("a cost");
        prop_assert!(price.peak() <= budget);
        let found = price.seconds(throughput);
        for other in every_plan(shape) {
            for chunk in &throughput.chunks {
                let other = other.clone().with_chunk(chunk.tokens);
                let least = planner.cost(&other).expect("a cost").peak();
                prop_assert!(
                    least >= smallest,
                    "{other} fits {least} bytes, the smallest is {smallest}"
                );
                let Some(time) = seconds(&planner, &other, throughput, (context, budget)) else {
                    continue;
                };
                prop_assert!(
                    found <= time * (1.0 + 1e-9),
                    "{plan}, {} hot tokens of {context}, chunks of {}: {found} s; {other}, chunks of {}: {time} s",
                    plan.hot(),
                    plan.chunk(),
                    chunk.tokens,
                );
            }
        }
        Ok(())
    });
}

#[test]
fn a_larger_budget_is_never_slower() {
    check(32, |shape, throughput, context, share| {
        let step = (context as f64 * share) as usize;
        let planner = Planner::new(shape, throughput, context)
            .expect("sizes are known")
            .with_sequences(2)
            .with_steps_of(step);
        let smallest = planner.smallest();
        let room = most(shape, &planner).saturating_sub(smallest);
        let mut last = f64::INFINITY;
        for step in 0..=40 {
            let budget = smallest + room * step / 36;
            let plan = planner.plan(budget).expect("no less than the smallest");
            let time = planner.cost(&plan).expect("a cost").seconds(throughput);
            prop_assert!(
                time <= last,
                "{budget} bytes: {plan} takes {time} s, one with less {last} s"
            );
            last = time;
        }
        Ok(())
    });
}

#[test]
fn a_budget_below_the_smallest_is_refused_with_it() {
    check(64, |shape, throughput, context, share| {
        let planner = Planner::new(shape, throughput, context)
            .expect("sizes are known")
            .with_steps_of((context as f64 * share) as usize);
        let smallest = planner.smallest();
        prop_assert!(planner.plan(smallest).is_ok());
        for budget in [0, smallest / 2, smallest - 1] {
            let refused = planner.plan(budget);
            prop_assert!(
                matches!(
                    refused,
                    Err(CacheError::BudgetBytes { budget: b, smallest: s }) if b == budget && s == smallest
                ),
                "{budget} of {smallest}: {refused:?}"
            );
        }
        Ok(())
    });
}

/// Where keys and values are each as wide as the residual, a residual at every layer halves them. It is
/// chosen where there is no room for more and a replay would be slow.
#[test]
fn residuals_of_every_layer_are_found_where_smaller() {
    let (throughput, shapes) = (throughput(), shapes());
    let shape = &shapes[1];
    assert_eq!(
        shape.hidden,
        (shape.kernels.kv_heads * shape.kernels.head_dim)
    );
    let planner = Planner::new(shape, &throughput, 8_000).expect("sizes are known");
    let residuals = Plan::residuals(shape);
    let per_token = residuals.bytes_per_old_token(shape);
    assert_eq!(2 * per_token, shape.keys_values_per_old_token());
    let budget = planner
        .cost(&residuals.with_chunk(16))
        .expect("a cost")
        .peak();
    let plan = planner.plan(budget).expect("residuals fit");
    let replayed = (1..5).filter(|&layer| plan.retain(layer) == Retain::Nothing);
    assert_eq!(replayed.count(), 0, "{plan}");
    assert!(plan.bytes_per_old_token(shape) <= per_token, "{plan}");
}

#[test]
fn senseless_sizes_are_bounded_or_refused() {
    let shape = DecoderConfig::new(97, 64, 4, 4, 4).shape(burn::tensor::DType::F32);
    assert_eq!(Plan::tokens(&shape).with_chunk(usize::MAX).chunk(), 4096);
    assert_eq!(Plan::tokens(&shape).with_chunk(0).chunk(), 1);
    let of =
        |tokens: &str| format!("read 1e9; {tokens} tokens: projection 1, block 1, attention 1");
    for wrong in [
        &of("0"),
        &of("5000"),
        "",
        "read -1",
        "read 1e9",
        "read nan; 1 tokens: projection 1, block 1, attention 1",
    ] {
        let refused = wrong.parse::<Throughput>();
        assert!(
            matches!(refused, Err(CacheError::Throughput { .. })),
            "{wrong:?}"
        );
    }
    let mut throughput: Throughput = of("16").parse().expect("throughput");
    throughput.chunks.clear();
    let planner = Planner::new(&shape, &throughput, usize::MAX)
        .expect("sizes are known")
        .with_sequences(0)
        .with_steps_of(0);
    let all = planner.plan(planner.everything()).expect("everything fits");
    assert_eq!(all.retain(0), kv_direct::residual::Retain::KeysValues);
    assert!(
        planner.plan(planner.smallest()).is_ok(),
        "however slow that is"
    );
    assert!(planner.plan(0).is_err());
}
