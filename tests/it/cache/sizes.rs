//! Shapes, dtypes and bytes of entries.

use std::{num::NonZeroUsize, sync::Arc};

use burn::tensor::{DType, Device, Tensor};
use kv_direct::{
    cache::{CacheError, KeysValues, ModelShape},
    exact::{KernelShapes, PANEL, Segment},
    model::ForwardError,
    policy::FullKv,
    positions::Positions,
};

use crate::support::{feed::refusal, models::tiny};

#[test]
fn entries_of_another_dtype_are_refused() {
    let decoder = tiny(2);
    let mut shape = decoder.shape();
    shape.cache_dtype = DType::F16;
    let error = refusal(&decoder, &mut FullKv::new(&shape), &[1, 2][..]);
    assert_eq!(error.to_string(), "keys are F32, expected F16");
    shape = decoder.shape();
    shape.dtype = DType::F16;
    let error = refusal(&decoder, &mut FullKv::new(&shape), &[1, 2][..]);
    assert_eq!(error.to_string(), "residuals are F32, expected F16");
}

#[test]
fn entries_of_another_shape_are_refused() {
    let (two, four) = (tiny(2), tiny(4));
    let mut cache = FullKv::new(&two.shape());
    let error = refusal(&four, &mut cache, &[1, 2][..]);
    let expected = "keys have shape [1, 4, 2, 16], expected [1, 2, 2, 16]";
    assert_eq!(error.to_string(), expected);
    assert!(matches!(
        error,
        ForwardError::Cache(CacheError::Shape { what: "keys", .. })
    ));
}

#[test]
fn keys_values_and_positions_must_have_the_same_slots() {
    let device = Device::flex();
    let segment = |panels: usize, slots: usize, positions: Vec<usize>, start| {
        Segment::new(
            Tensor::zeros([2, panels, 4, PANEL], &device),
            Tensor::zeros([2, slots, 4], &device),
            vec![Arc::new(positions)],
            start,
        )
    };
    let free = |slots| vec![Positions::EMPTY; slots];
    let new = |segments| KeysValues::new(vec![vec![], segments]);
    let what = |segments| match new(segments) {
        Err(CacheError::Shape { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    assert_eq!(what(vec![segment(2, 50, free(50), 0)]), "values");
    assert_eq!(what(vec![segment(2, 96, free(96), 0)]), "keys");
    let positions = "positions of the slots";
    assert_eq!(what(vec![segment(2, 64, free(63), 0)]), positions);
    let start = "the start of a segment";
    assert_eq!(what(vec![segment(2, 64, free(64), 8)]), start);
    assert!(new(vec![segment(2, 64, free(64), 96)]).is_ok());

    // Two segments share a panel: the first uses four of its slots.
    let first: Vec<usize> = (0..36).chain(free(28)).collect();
    let second = |from: usize| free(from).into_iter().chain(from + 32..64).collect();
    let both = |from| {
        let second = segment(1, 32, second(from), 32);
        vec![segment(2, 64, first.clone(), 0), second]
    };
    assert!(new(both(4)).is_ok());
    assert_eq!(what(both(3)), "the first slot in use of a segment");
    let mut turned = both(4);
    turned.reverse();
    assert_eq!(what(turned), "the first slot in use of a segment");
}

/// In bf16: keys and values of a token in all layers, and one residual a layer.
#[test]
fn bytes_of_a_token_follow_from_the_widths() {
    let models = [
        ((30, 576, 9, 3, 64), 23_040, 34_560),
        ((16, 2048, 32, 8, 64), 32_768, 65_536),
        ((24, 896, 14, 2, 64), 12_288, 43_008),
        ((28, 1024, 16, 8, 128), 114_688, 57_344),
        ((26, 1152, 4, 1, 256), 26_624, 59_904),
        ((34, 2560, 8, 4, 256), 139_264, 174_080),
    ];
    for ((layers, hidden, heads, kv_heads, head_dim), keys_values, residuals) in models {
        let kernels = KernelShapes::new(heads, kv_heads, head_dim);
        let mut shape = ModelShape::new(layers, hidden, DType::BF16, kernels);
        assert_eq!(shape.keys_values_per_token(), keys_values);
        assert_eq!(shape.residuals_per_token(), residuals);
        // Entries beyond a window cost nothing there.
        shape.windows[0] = NonZeroUsize::new(512);
        let left = keys_values / layers * (layers - 1);
        assert_eq!(shape.keys_values_per_old_token(), left);
        assert_eq!(shape.keys_values_per_token(), keys_values);
    }
}
