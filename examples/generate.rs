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
    text::{Chat, Message, TextGeneration, Tokenizer},
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
        sampling,
        tokenizer: &tokenizer,
        model,
        args,
    };
    if let Some(prompt) = &session.args.prompt {
        let ids = session.tokenizer.encode(prompt)?;
        print!("{}", session.tokenizer.decode(&ids)?);
        session.reply(&ids, &[])?;
        return Ok(());
    }
    let mut chat = Chat::new(session.tokenizer);
    for line in stdin().lines() {
        chat.push(Message::new("user", line?));
        let new = chat.prompt(&mut session.cache)?;
        let (reply, ids) = session.reply(&new, &chat.ids()[..chat.ids().len() - new.len()])?;
        chat.push_reply(reply, &ids)?;
    }
    Ok(())
}

/// What all turns of a chat share.
struct Session<'a> {
    args: Args,
    model: Pretrained,
    tokenizer: &'a Tokenizer,
    sampling: Sampling,
    cache: Box<dyn CacheBackend>,
}

impl Session<'_> {
    /// Processes the ids that follow `held`, those of the cache, and prints the reply. Returns its text and its ids.
    fn reply(&mut self, new: &[u32], held: &[u32]) -> Result<(String, Vec<u32>)> {
        let start = Instant::now();
        let generation = Generation::new(&self.model.decoder, &mut *self.cache, new)?
            .with_history(held)
            .with_eos(&self.model.eos)
            .with_max_new(self.args.sample_len)
            .with_sampling(self.sampling.clone());
        let mut text = TextGeneration::new(generation, self.tokenizer);
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
        let (reason, ids) = (text.finish_reason(), text.ids().to_vec());
        let (seconds, memory) = (start.elapsed().as_secs_f64(), self.cache.memory());
        let (processed, count) = (new.len(), ids.len());
        if let Some(reason) = reason {
            eprintln!("finished: {reason:?}");
        }
        eprintln!(
            "{processed} tokens processed, {count} generated in {seconds:.2} s, cache {} bytes, scratch {}",
            memory.total(),
            memory.scratch_peak
        );
        Ok((reply, ids))
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
