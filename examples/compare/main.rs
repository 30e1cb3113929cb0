//! What each backend stores, loses and costs, with `FullKv` as reference:
//! `cargo run --example compare` on the small built-in model, `-- --model DIR` on a real one.
//!
//! The defaults are the set-up of the KV-Direct paper's Figure 4: 512 tokens of context, 50 new ones,
//! budgets of 32 to 384 entries.

#[path = "../common/bits.rs"]
mod bits;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/kind.rs"]
mod kind;
#[path = "../common/kl.rs"]
mod kl;
mod measure;
mod plot;
mod report;

use std::{fs, io::Write, path::PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use kind::Kind;
use kv_direct::text::Tokenizer;
use measure::{Measurement, Prompt, Reference, Setup};

/// Compares cache backends on greedy decoding.
#[derive(Parser)]
struct Args {
    /// Folder with config.json, safetensors and tokenizer.json.
    #[arg(long, default_value = common::BUILT_IN)]
    model: PathBuf,
    /// Tokens of every prompt; a table for each.
    #[arg(long, value_delimiter = ',', default_values_t = [512])]
    context: Vec<usize>,
    /// Tokens to decode.
    #[arg(long, default_value_t = 50)]
    new: usize,
    /// Budgets in entries, a run for each.
    #[arg(long, value_delimiter = ',', default_values_t = [32, 64, 128, 256, 384])]
    budgets: Vec<usize>,
    /// Backends, each at every budget: window, streaming_llm, h2o, tova, snap_kv, residual (token ids
    /// for all but the hot tokens), or residuals (one residual per layer).
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "window,streaming_llm,h2o,tova,snap_kv,residual"
    )]
    backends: Vec<String>,
    /// Prompts, cut from the text at even distances.
    #[arg(long, default_value_t = 1)]
    prompts: usize,
    /// Text the prompts are cut from, instead of a story of the project's own.
    #[arg(long)]
    text: Option<PathBuf>,
    /// Tokens of the text behind each prompt to score: perplexity, fed one by one.
    #[arg(long, default_value_t = 0)]
    score: usize,
    /// Feeds prompts to all backends but the reference in steps of this many tokens.
    #[arg(long)]
    chunk: Option<usize>,
    /// One JSON object on stdout instead of a table.
    #[arg(long)]
    json: bool,
    /// Draws token match and divergence over the budget into this SVG file.
    #[arg(long)]
    plot: Option<PathBuf>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(
        !args.context.contains(&0) && args.new > 1 && args.prompts > 0 && args.chunk != Some(0),
        "context, prompts and chunk must not be 0, new must be 2 or more"
    );
    let tokenizer = Tokenizer::from_dir(&args.model)?;
    let text = args.text.as_ref().map_or_else(
        || Ok(include_str!("text.txt").to_owned()),
        |path| fs::read_to_string(path).with_context(|| format!("reading {}", path.display())),
    )?;
    // What the folder puts in front of a text belongs in front of every prompt.
    let start = tokenizer.encode("")?;
    let ids = tokenizer.encode(&text)?;
    let ids = ids.strip_prefix(&start[..]).unwrap_or(&ids);
    let prompts: Vec<Vec<Prompt>> = args
        .context
        .iter()
        .map(|&context| prompts(&start, ids, context, args.score, args.prompts))
        .collect::<Result<_>>()?;

    let model = common::load(&args.model)?;
    let decoder = &model.decoder;
    let setup = Setup {
        decoder,
        chunk: args.chunk,
    };
    let mut runs: Vec<(Kind, usize)> = Vec::new();
    for name in &args.backends {
        for &budget in &args.budgets {
            let kind = Kind::with_budget(name, budget);
            let kind = kind.with_context(|| format!("there is no backend {name}"))?;
            // Refused now, not after an hour.
            kind.cache(decoder)
                .with_context(|| format!("{name} with {budget} entries"))?;
            runs.push((kind, budget));
        }
    }

    let each = (args.new + args.score).saturating_mul(args.prompts * args.context.len());
    let bar = ProgressBar::new((runs.len() + 1).saturating_mul(each) as u64);
    bar.set_style(ProgressStyle::with_template(
        "{msg:24} {bar:40} {pos}/{len} tokens, {eta} left",
    )?);
    let mut tables = Vec::new();
    for prompts in &prompts {
        tables.push(table(&setup, prompts, args.new, &runs, &bar)?);
    }
    bar.finish_and_clear();

    let name = args
        .model
        .file_name()
        .map_or_else(|| "model".into(), |name| name.to_string_lossy());
    let head = report::Head {
        model: &name,
        new: args.new,
        prompts: args.prompts,
        score: args.score,
    };
    if let Some(path) = &args.plot {
        plot::draw(path, &head, &tables)?;
    }
    let mut stdout = std::io::stdout().lock();
    if args.json {
        writeln!(stdout, "{}", report::json(&head, &tables))?;
    } else {
        for rows in &tables {
            write!(stdout, "{}", report::table(&head, rows))?;
        }
        write!(stdout, "{}", report::LEGEND)?;
    }
    Ok(())
}

/// All runs over prompts of one length.
fn table(
    setup: &Setup<'_>,
    prompts: &[Prompt],
    new: usize,
    runs: &[(Kind, usize)],
    bar: &ProgressBar,
) -> Result<Vec<Measurement>> {
    let mut rows: Vec<Measurement> = Vec::new();
    for prompt in prompts {
        bar.set_message("full");
        let (reference, full) = Reference::run(setup, prompt, new, bar)?;
        let mut measured = vec![full];
        for (kind, budget) in runs {
            bar.set_message(format!(
                "{} {budget}",
                report::name(&serde_json::json!(kind))
            ));
            measured.push(reference.compare(setup, kind, *budget, prompt, bar)?);
        }
        if rows.is_empty() {
            rows = measured;
        } else {
            rows.iter_mut()
                .zip(measured)
                .for_each(|(row, more)| row.add(more));
        }
    }
    Ok(rows)
}

/// `count` prompts of `length` ids, `start` first, and what follows them, from the start of the text to
/// its end at even distances.
fn prompts(
    start: &[u32],
    ids: &[u32],
    length: usize,
    follow: usize,
    count: usize,
) -> Result<Vec<Prompt>> {
    ensure!(length > start.len(), "a prompt needs more than {start:?}");
    let own = length - start.len();
    let needed = own.saturating_add(follow);
    ensure!(
        ids.len() >= needed,
        "the text has {} tokens, a prompt and what is scored behind it need {needed}",
        ids.len()
    );
    let spare = ids.len() - needed;
    let distance = if count > 1 { spare / (count - 1) } else { 0 };
    ensure!(
        count == 1 || distance > 0,
        "the text has {} tokens: too few for {count} prompts of {length}",
        ids.len()
    );
    let prompt = |i: usize| {
        let (tokens, rest) = ids[i * distance..].split_at(own);
        Prompt {
            tokens: [start, tokens].concat(),
            continuation: rest[..follow].to_vec(),
        }
    };
    Ok((0..count).map(prompt).collect())
}
