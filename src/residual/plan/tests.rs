use burn::tensor::DType;

use super::{
    Retain::{KeysValues, Nothing, Residual},
    *,
};
use crate::exact::KernelShapes;

fn shape(windows: &[bool]) -> ModelShape {
    let mut shape = ModelShape::new(windows.len(), 64, DType::F32, KernelShapes::new(4, 2, 16));
    for (window, &slides) in shape.windows.iter_mut().zip(windows) {
        *window = slides.then_some(std::num::NonZeroUsize::MIN);
    }
    shape
}

fn flow(shape: &ModelShape, layers: &[Retain], windows: bool) -> String {
    let plan = Plan::new(shape, layers.to_vec()).expect("a plan");
    let sign = |flow: Flow| match (flow.enters, flow.leaves) {
        (false, _) => '.',
        (true, false) => 'p',
        (true, true) => 'b',
    };
    let missing = |layer| plan.rebuilds(layer) || windows && plan.slides[layer];
    plan.flow(missing).into_iter().map(sign).collect()
}

#[test]
fn a_replay_ends_with_a_projection_where_entries_are_missing() {
    let full = shape(&[false; 4]);
    assert_eq!(flow(&full, &[Nothing; 4], false), "bbbp");
    assert_eq!(
        flow(&full, &[Nothing, Nothing, KeysValues, KeysValues], false),
        "bp.."
    );
    assert_eq!(
        flow(&full, &[KeysValues, KeysValues, Residual, Nothing], false),
        "..bp"
    );
    assert_eq!(flow(&full, &[Residual; 4], false), "pppp");
    assert_eq!(
        flow(&full, &[Nothing, KeysValues, Nothing, KeysValues], false),
        "bbp."
    );
    assert_eq!(flow(&full, &[KeysValues; 4], false), "....");
}

#[test]
fn a_replay_passes_through_sliding_windows() {
    let gemma = shape(&[true, false, true, true]);
    assert_eq!(flow(&gemma, &[Nothing; 4], false), "bp..");
    assert_eq!(flow(&gemma, &[Nothing; 4], true), "bbbp");
    let ids = [true, false].map(|first| Plan::residuals(&shape(&[first, false])).retains_ids());
    assert_eq!(
        ids,
        [true, false],
        "nothing else leads to the window of the first layer"
    );
    assert!(Plan::tokens(&shape(&[true; 2])).retains_ids());
    assert!(!Plan::new(&shape(&[false; 2]), vec![KeysValues; 2]).is_ok_and(|p| p.retains_ids()));
}

#[test]
fn a_plan_for_another_model_is_refused() {
    let gemma = shape(&[true, false]);
    let refused = Plan::new(&gemma, vec![KeysValues; 2]).map(drop);
    assert!(matches!(refused, Err(CacheError::PlanWindow { layer: 0 })));
    let refused = Plan::new(&gemma, vec![Nothing]).map(drop);
    assert!(matches!(
        refused,
        Err(CacheError::PlanLayers {
            expected: 2,
            found: 1
        })
    ));
    assert!(Plan::retain_top(&gemma, 3).is_err() && Plan::residual_at(&gemma, 2).is_err());
    assert_eq!(
        Plan::retain_top(&gemma, 2).map(|plan| plan.retain(0)).ok(),
        Some(Nothing)
    );
}
