//! Text from a model folder, through any cache:
//! `cargo run --release --example generate -- --model DIR --prompt "Once upon a time" --cache residual --hot 128`,
//! or a conversation, one line a turn, with `--chat` in place of `--prompt`.

mod common;

use std::{
    io::{Write, stdin, stdout},
    path::PathBuf,
    time::Instant,
};

use anyhow::Result;
use clap::{Parser, ValueEnum};
use kv_direct::{
    cache::{CacheBackend, FullKv, ResidualCheckpoint, ResidualConfig, Window},
    generate::{Generation, Sampling},
    model::Decoder,
    pretrained::Pretrained,
    text::{Message, TextGeneration, Tokenizer},
};

/// Text from a model folder.
#[derive(Parser)]
struct Args {
    /// Folder with config.json, safetensors and tokenizer.json.
    #[arg(long, default_value = common::BUILT_IN)]
    model: PathBuf,
    /// Text to go on from.
    #[arg(long, required_unless_present = "chat", conflicts_with = "chat")]
    prompt: Option<String>,
    /// Talk: every line of the standard input is a turn.
    #[arg(long)]
    chat: bool,
    /// Tokens to generate at most, for every prompt.
    #[arg(long, short = 'n', default_value_t = 64)]
    sample_len: usize,
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
    /// Text to end before; may be given more than once.
    #[arg(long)]
    stop: Vec<String>,
    /// Cache to decode through.
    #[arg(long, default_value = "full")]
    cache: Kind,
    /// Rows kept by window and residual.
    #[arg(long, default_value_t = 128)]
    hot: usize,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let tokenizer = Tokenizer::from_dir(&args.model)?;
    let sampling = sampling(&args)?;
    let model = common::load(&args.model)?;
    let mut session = Session {
        cache: cache(args.cache, args.hot, &model.decoder)?,
        held: Vec::new(),
        sampling,
        tokenizer,
        model,
        args,
    };
    if let Some(prompt) = &session.args.prompt {
        let ids = session.tokenizer.encode(prompt)?;
        print!("{}", session.tokenizer.decode(&ids)?);
        session.answer(&ids)?;
        return Ok(());
    }
    let mut messages = Vec::new();
    for line in stdin().lines() {
        messages.push(Message::new("user", line?));
        let ids = session.tokenizer.encode_chat(&messages, true)?;
        messages.push(Message::new("assistant", session.answer(&ids)?));
    }
    Ok(())
}

fn sampling(args: &Args) -> Result<Sampling> {
    let sampling = Sampling::new()
        .with_temperature(args.temperature)?
        .with_top_p(args.top_p)?
        .with_min_p(args.min_p)?
        .with_repetition_penalty(args.repetition_penalty)?
        .with_seed(args.seed);
    Ok(match args.top_k {
        Some(top_k) => sampling.with_top_k(top_k)?,
        None => sampling,
    })
}

/// What lives on from turn to turn.
struct Session {
    args: Args,
    model: Pretrained,
    tokenizer: Tokenizer,
    sampling: Sampling,
    cache: Box<dyn CacheBackend>,
    /// The ids that the cache holds.
    held: Vec<u32>,
}

impl Session {
    /// Prints the answer to `ids`, feeding only what the cache does not hold yet.
    fn answer(&mut self, ids: &[u32]) -> Result<String> {
        let same = self.held.iter().zip(ids).take_while(|(a, b)| a == b);
        // One id at least has to be fed.
        let mut keep = same.count().min(ids.len().saturating_sub(1));
        if self.cache.truncate(keep).is_err() {
            self.cache.clear();
            keep = 0;
        }
        let start = Instant::now();
        let generation = Generation::new(&self.model.decoder, &mut *self.cache, &ids[keep..])?
            .with_history(&ids[..keep])
            .with_eos(&self.model.eos)
            .with_max_new(self.args.sample_len)
            .with_sampling(self.sampling.clone());
        let mut text = TextGeneration::new(generation, &self.tokenizer);
        for stop in &self.args.stop {
            text = text.with_stop(stop)?;
        }
        let mut answer = String::new();
        for piece in text.by_ref() {
            let piece = piece?;
            print!("{piece}");
            stdout().flush()?;
            answer += &piece;
        }
        println!();
        let (reason, new) = (text.finish_reason().cloned(), text.ids().to_vec());
        let (seconds, memory) = (start.elapsed().as_secs_f64(), self.cache.memory());
        let (fed, count) = (ids.len() - keep, new.len());
        if let Some(reason) = reason {
            eprintln!("finished: {reason:?}");
        }
        eprintln!(
            "{fed} tokens fed, {count} generated in {seconds:.2} s, cache {} bytes, scratch {}",
            memory.total(),
            memory.scratch_peak
        );
        // The last id was generated, not fed.
        self.held = [ids, &new].concat();
        self.held.truncate(self.cache.position(0));
        Ok(answer)
    }
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
