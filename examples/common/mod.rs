//! What the examples share: loading with a progress bar, and caches by name.

use std::path::Path;

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use indicatif::{ProgressBar, ProgressStyle};
use kv_direct::{
    cache::{CacheBackend, FullKv, ResidualCheckpoint, ResidualConfig, Window},
    model::Decoder,
    pretrained::{Pretrained, load_with_progress},
};

/// The small model of the repository, used where no `--model` is given.
pub const BUILT_IN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/tiny");

/// Loads the model in `dir` on the CPU, with a bar on stderr.
pub fn load(dir: &Path) -> Result<Pretrained> {
    let bar = ProgressBar::new(0).with_style(ProgressStyle::with_template(
        "loading {bar:40} {bytes}/{total_bytes}",
    )?);
    let model = load_with_progress(dir, &Device::flex(), |loaded| {
        bar.set_length(loaded.total);
        bar.set_position(loaded.bytes);
    });
    bar.finish_and_clear();
    model.with_context(|| format!("loading {}", dir.display()))
}

/// A cache by its `--cache` name, `hot` rows kept.
pub fn cache(name: &str, hot: usize, decoder: &Decoder) -> Result<Box<dyn CacheBackend>> {
    let shape = decoder.shape();
    Ok(match name {
        "full" => Box::new(FullKv::new(&shape)),
        "window" => Box::new(Window::new(&shape, hot)?),
        "residual" => Box::new(ResidualCheckpoint::new(
            &shape,
            decoder.device(),
            ResidualConfig::new(hot),
        )?),
        other => bail!("unknown cache {other}: full, window or residual"),
    })
}
