//! Text from a model folder, through any cache:
//! `cargo run --release --example generate -- --model DIR --prompt "Once upon a time" --cache residual --hot 128`,
//! or a conversation, one line a turn, with `--chat` in place of `--prompt`.

mod common;
#[path = "common/kind.rs"]
mod kind;
#[path = "common/sampling.rs"]
mod sampling;

use std::{
    io::{Write, stdin, stdout},
    path::PathBuf,
    time::Instant,
};

use anyhow::{Context, Result};
use clap::Parser;
use kind::Kind;
use kv_direct::{
    cache::CacheBackend,
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
    #[command(flatten)]
    sampling: sampling::Flags,
    /// Text to end before; may be given more than once.
    #[arg(long)]
    stop: Vec<String>,
    /// Cache to decode through: full, window, streaming_llm, h2o, tova, snap_kv or residual.
    #[arg(long, default_value = "full")]
    cache: String,
    /// Entries that stay in the cache; ignored by full.
    #[arg(long, default_value_t = 128)]
    hot: usize,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let tokenizer = Tokenizer::from_dir(&args.model)?;
    let sampling = args.sampling.build()?;
    let mut model = common::load(&args.model)?;
    model.eos.extend(tokenizer.eos());
    let mut session = Session {
        cache: cache(&args.cache, args.hot, &model.decoder)?,
        held: Vec::new(),
        sampling,
        tokenizer,
        model,
        args,
    };
    if let Some(prompt) = &session.args.prompt {
        let ids = session.tokenizer.encode(prompt)?;
        print!("{}", session.tokenizer.decode(&ids)?);
        session.reply(&ids)?;
        return Ok(());
    }
    let mut messages = Vec::new();
    for line in stdin().lines() {
        messages.push(Message::new("user", line?));
        let ids = session.tokenizer.encode_chat(&messages, true)?;
        messages.push(Message::new("assistant", session.reply(&ids)?));
    }
    Ok(())
}

/// What all turns of a chat share.
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
    /// Prints the reply to `ids`, feeding only what the cache does not hold yet.
    fn reply(&mut self, ids: &[u32]) -> Result<String> {
        let same = self.held.iter().zip(ids).take_while(|(a, b)| a == b);
        // One id at least has to be fed.
        let mut keep = same.count().min(ids.len().saturating_sub(1));
        if self.cache.truncate(&[keep]).is_err() {
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
        let mut reply = String::new();
        for piece in text.by_ref() {
            let piece = piece?;
            print!("{piece}");
            stdout().flush()?;
            reply += &piece;
        }
        println!();
        let (reason, new) = (text.finish_reason(), text.ids().to_vec());
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
        self.held
            .truncate(self.cache.lengths().first().copied().unwrap_or(0));
        Ok(reply)
    }
}

/// A cache by its name, with a budget of `hot` entries.
fn cache(name: &str, hot: usize, decoder: &Decoder) -> Result<Box<dyn CacheBackend>> {
    let kind = match name {
        "full" => Some(Kind::Full {}),
        name => Kind::with_budget(name, hot),
    };
    let kind = kind.with_context(|| format!("there is no cache {name}"))?;
    Ok(kind.cache(decoder)?)
}
