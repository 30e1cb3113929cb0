//! The paper's patching experiment: the residual stream is the whole state.

use crate::support::{
    models::tiny,
    patching::{last_kl, patch},
    random::tokens,
};

#[test]
fn residuals_of_another_prompt_give_its_output() {
    for kv_heads in [1, 2, 4] {
        let decoder = tiny(kv_heads);
        let (recipient, donor) = (tokens(1, 30), tokens(900, 30));
        for layer in 0..decoder.shape().layers() {
            let (patched, expected) = patch(&decoder, &recipient, &donor, layer);
            assert_eq!(patched, expected, "layer {layer}");
            assert_eq!(last_kl(&patched, &expected, 97), 0.0);
        }
    }
}
