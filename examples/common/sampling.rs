//! The flags of sampling.

use anyhow::Result;
use clap::Args;
use kv_direct::generate::Sampling;

#[derive(Args)]
pub(crate) struct Flags {
    /// 0 takes the most probable token, 1 samples from the model's own distribution.
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Sample from this many most probable tokens.
    #[arg(long)]
    top_k: Option<usize>,
    /// Sample from the most probable tokens that reach this probability together.
    #[arg(long, default_value_t = 1.0)]
    top_p: f64,
    /// Sample from tokens at least this probable, relative to the most probable one.
    #[arg(long, default_value_t = 0.0)]
    min_p: f64,
    /// Above 1, makes tokens that came before less likely.
    #[arg(long, default_value_t = 1.0)]
    repetition_penalty: f64,
    /// Same seed, same text.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

impl Flags {
    pub(crate) fn build(&self) -> Result<Sampling> {
        let sampling = Sampling::new()
            .with_temperature(self.temperature)?
            .with_top_p(self.top_p)?
            .with_min_p(self.min_p)?
            .with_repetition_penalty(self.repetition_penalty)?
            .with_seed(self.seed);
        Ok(match self.top_k {
            Some(top_k) => sampling.with_top_k(top_k)?,
            None => sampling,
        })
    }
}
