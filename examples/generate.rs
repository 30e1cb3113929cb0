//! Prompt in, text out, through any cache:
//! `cargo run --release --example generate -- --model DIR --prompt "Once upon a time" --cache residual --hot 128`

mod common;

use std::{
    io::{Write, stdout},
    path::PathBuf,
    time::Instant,
};

use anyhow::{Result, anyhow};
use clap::{Parser, ValueEnum};
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
    /// Cache to decode through.
    #[arg(long, default_value = "full")]
    cache: Kind,
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
    let mut cache = cache(args.cache, args.hot, &model.decoder)?;

    print!(
        "{}",
        tokenizer
            .decode(prompt.get_ids(), true)
            .map_err(|error| anyhow!(error))?
    );
    let mut stream = tokenizer.decode_stream(true);
    let (mut ids, mut shown) = (Vec::new(), String::new());
    let start = Instant::now();
    let greedy = Greedy::new(&model.decoder, &mut cache, prompt.get_ids())?.with_eos(&model.eos);
    for id in greedy.take(args.sample_len) {
        ids.push(id?);
        if let Some(piece) = stream
            .step(ids[ids.len() - 1])
            .map_err(|error| anyhow!(error))?
        {
            print!("{piece}");
            stdout().flush()?;
            shown += &piece;
        }
    }
    // A character that was cut off in the middle of its bytes.
    let text = tokenizer
        .decode(&ids, true)
        .map_err(|error| anyhow!(error))?;
    print!("{}", text.strip_prefix(&shown).unwrap_or_default());
    let count = ids.len();
    let (seconds, memory) = (start.elapsed().as_secs_f64(), cache.memory());
    println!();
    eprintln!(
        "{count} tokens in {seconds:.2} s, cache {} bytes, scratch {}",
        memory.total(),
        memory.scratch_peak
    );
    Ok(())
}

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    Full,
    Window,
    Residual,
}

/// A cache that keeps `hot` rows.
fn cache(kind: Kind, hot: usize, decoder: &Decoder) -> Result<Box<dyn CacheBackend>> {
    let shape = decoder.shape();
    Ok(match kind {
        Kind::Full => Box::new(FullKv::new(&shape)),
        Kind::Window => Box::new(Window::new(&shape, hot)?),
        Kind::Residual => {
            let config = ResidualConfig::new(hot);
            Box::new(ResidualCheckpoint::new(&shape, decoder.device(), config)?)
        }
    })
}
