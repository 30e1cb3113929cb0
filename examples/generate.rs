//! Prompt in, text out, through any cache:
//! `cargo run --release --example generate -- --model DIR --prompt "Once upon a time" --cache residual --hot 128`

mod common;

use std::{
    io::{Write, stdout},
    path::PathBuf,
    time::Instant,
};

use anyhow::{Result, anyhow, bail};
use clap::Parser;
use kv_direct::{
    cache::{CacheBackend, FullKv, ResidualCheckpoint, ResidualConfig, Window},
    generate::Greedy,
    model::Decoder,
};
use tokenizers::Tokenizer;

/// Greedy text from a model folder.
#[derive(Parser)]
struct Args {
    /// Folder with config.json, safetensors and tokenizer.json.
    #[arg(long, default_value = common::BUILT_IN)]
    model: PathBuf,
    /// Text to go on from.
    #[arg(long)]
    prompt: String,
    /// Tokens to generate at most.
    #[arg(long, short = 'n', default_value_t = 64)]
    sample_len: usize,
    /// full, window or residual.
    #[arg(long, default_value = "full")]
    cache: String,
    /// Rows kept by window and residual.
    #[arg(long, default_value_t = 128)]
    hot: usize,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let tokenizer =
        Tokenizer::from_file(args.model.join("tokenizer.json")).map_err(|error| anyhow!(error))?;
    let prompt = tokenizer
        .encode(args.prompt, true)
        .map_err(|error| anyhow!(error))?;
    let model = common::load(&args.model)?;
    let mut cache = cache(&args.cache, args.hot, &model.decoder)?;

    let mut text = tokenizer.decode_stream(true);
    let mut show = |id| -> Result<()> {
        if let Some(piece) = text.step(id).map_err(|error| anyhow!(error))? {
            print!("{piece}");
            stdout().flush()?;
        }
        Ok(())
    };
    prompt.get_ids().iter().try_for_each(|&id| show(id))?;
    let start = Instant::now();
    let mut count = 0;
    for id in Greedy::new(&model.decoder, &mut cache, prompt.get_ids())?
        .with_eos(&model.eos)
        .take(args.sample_len)
    {
        show(id?)?;
        count += 1;
    }
    let (seconds, memory) = (start.elapsed().as_secs_f64(), cache.memory());
    println!();
    eprintln!(
        "{count} tokens in {seconds:.2} s, cache {} bytes, scratch {}",
        memory.total(),
        memory.scratch_peak
    );
    Ok(())
}

/// A cache by its `--cache` name, `hot` rows kept.
fn cache(name: &str, hot: usize, decoder: &Decoder) -> Result<Box<dyn CacheBackend>> {
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
