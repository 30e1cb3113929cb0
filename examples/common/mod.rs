//! What the examples share: the built-in model, and loading with a progress bar.

use std::path::Path;

use anyhow::{Context, Result};
use burn::tensor::Device;
use indicatif::{ProgressBar, ProgressStyle};
use kv_direct::pretrained::{Pretrained, load_with_progress};

/// The small model of the repository, used where no `--model` is given.
pub(crate) const BUILT_IN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/tiny");

/// Loads the model in `dir` on the CPU, with a bar on stderr.
pub(crate) fn load(dir: &Path) -> Result<Pretrained> {
    let bar = ProgressBar::new(0).with_style(ProgressStyle::with_template(
        "loading {bar:40} {bytes}/{total_bytes}",
    )?);
    let model = load_with_progress(dir, &Device::flex(), |loaded| {
        bar.set_length(loaded.total);
        bar.set_position(loaded.bytes);
    });
    bar.finish_and_clear();
    let model = model.with_context(|| format!("loading {}", dir.display()))?;
    for warning in &model.warnings {
        eprintln!("warning: {warning}");
    }
    Ok(model)
}
