//! The planner against every plan there is.

use std::num::NonZeroUsize;

use burn::tensor::DType;
use kv_direct::{
    cache::{CacheError, ModelShape},
    exact::conformance::KernelShapes,
    planner::{Planner, Throughput},
    residual::{Plan, Retain},
};
use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};

use crate::budget::speeds;

/// Five layers: keys and values as wide as the residual together, each, and wider; and some with a window.
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

/// All plans of a model that a cache takes, whatever sense they make. But not with residuals in layers with a window:
/// there they save no more than scratch, of a replay after parking.
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

/// The predicted time of a plan with as many hot rows as the budget has room for; none where it has none. Not as
/// many as there are tokens, for there is to be room for a replay of rows that were parked.
fn seconds(
    planner: &Planner<'_>,
    plan: &Plan,
    speeds: &Throughput,
    (context, budget): (usize, usize),
) -> Option<f64> {
    let priced = |hot: usize| planner.cost(&plan.clone().with_hot(hot));
    let hots: Vec<usize> = (0..context).collect();
    let fitting = hots.partition_point(|&hot| priced(hot).expect("a cost").peak() <= budget);
    let hot = fitting.checked_sub(1)?;
    Some(priced(hot).expect("a cost").seconds(speeds))
}

fn rate() -> impl Strategy<Value = f64> {
    (9.0..11.5).prop_map(|digits: f64| 10f64.powf(digits))
}

/// Rates of two calls, as text.
fn rates() -> impl Strategy<Value = String> {
    let chunk = |rows: usize| {
        let rates = (rate(), rate(), rate());
        rates.prop_map(move |(projection, block, attention)| {
            format!(
                "; {rows} tokens: projection {projection:e}, block {block:e}, attention {attention:e}"
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
    let mut runner = TestRunner::new(Config {
        cases: count,
        failure_persistence: None,
        ..Config::default()
    });
    let result = runner.run(&strategy, |(shape, rates, context, share)| {
        let speeds = rates.parse().expect("rates of two calls");
        (of.borrow_mut())(&shapes[shape], &speeds, context, share)
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

fn most(shape: &ModelShape, planner: &Planner<'_>) -> usize {
    let all = Plan::keep_top(shape, shape.layers()).expect("as many layers");
    planner.cost(&all).expect("a cost").peak()
}

#[test]
fn no_plan_within_the_budget_is_faster() {
    check(128, |shape, speeds, context, share| {
        // A call of one token: then a budget has to hold what a step is priced at, and no more.
        let planner = Planner::new(shape, speeds, context)
            .expect("sizes are known")
            .with_steps_of(1);
        let smallest = planner.smallest();
        let room = most(shape, &planner).saturating_sub(smallest);
        let budget = smallest + (room as f64 * share) as usize;
        let plan = planner.plan(budget).expect("no less than the smallest");
        let price = planner.cost(&plan).expect("a cost");
        prop_assert!(price.peak() <= budget);
        let found = price.seconds(speeds);
        for other in every_plan(shape) {
            for chunk in &speeds.chunks {
                let other = other.clone().with_chunk(chunk.tokens);
                let least = planner.cost(&other).expect("a cost").peak();
                prop_assert!(
                    least >= smallest,
                    "{other} fits {least} bytes, the smallest is {smallest}"
                );
                let Some(time) = seconds(&planner, &other, speeds, (context, budget)) else {
                    continue;
                };
                prop_assert!(
                    found <= time * (1.0 + 1e-9),
                    "{plan}, {} hot rows of {context}, chunks of {}: {found} s; {other}, chunks of {}: {time} s",
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
    check(32, |shape, speeds, context, share| {
        let call = (context as f64 * share) as usize;
        let planner = Planner::new(shape, speeds, context)
            .expect("sizes are known")
            .with_sequences(2)
            .with_steps_of(call);
        let smallest = planner.smallest();
        let room = most(shape, &planner).saturating_sub(smallest);
        let mut last = f64::INFINITY;
        for step in 0..=40 {
            let budget = smallest + room * step / 36;
            let plan = planner.plan(budget).expect("no less than the smallest");
            let time = planner.cost(&plan).expect("a cost").seconds(speeds);
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
fn a_budget_that_is_too_small_is_refused_with_the_smallest_that_works() {
    check(64, |shape, speeds, context, share| {
        let planner = Planner::new(shape, speeds, context)
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

/// With keys and values as wide as the residual each, a residual at every layer halves them, and is chosen where
/// there is no room for more and a replay would be slow.
#[test]
fn residuals_of_every_layer_are_found_where_they_are_smaller() {
    let (speeds, shapes) = (speeds(), shapes());
    let shape = &shapes[1];
    assert_eq!(shape.hidden, shape.kv_width());
    let planner = Planner::new(shape, &speeds, 8_000).expect("sizes are known");
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
