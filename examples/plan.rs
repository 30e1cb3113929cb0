//! The cheapest plan within a byte budget, and the plans for other byte budgets:
//! `cargo run --release --example plan -- --model DIR --budget 64MiB --context 8192`.
//!
//! Prints the plan for the budget with its cost, then the frontier from the smallest budget to everything stored:
//! bytes, predicted time of a step, and the time measured.

#[path = "common/chart.rs"]
mod chart;
#[path = "common/mod.rs"]
mod common;
#[path = "common/frontier.rs"]
mod frontier;

use std::{fs, path::PathBuf, time::Instant};

use anyhow::{Context, Result, anyhow, ensure};
use clap::Parser;
use frontier::Point;
use indicatif::{ProgressBar, ProgressStyle};
use kv_direct::{
    cache::CacheBackend,
    model::{Decoder, Input},
    planner::{Planner, Throughput},
    policy::FullKv,
    residual::{ResidualCheckpoint, ResidualConfig},
};

/// Plans a cache within a byte budget.
#[derive(Parser)]
struct Args {
    /// Folder with config.json and safetensors.
    #[arg(long, default_value = common::BUILT_IN)]
    model: PathBuf,
    /// Bytes the cache may hold, the scratch of a step included: 65536, 512KiB, 64MiB, 2GiB.
    #[arg(long, value_parser = bytes, default_value = "1MiB")]
    budget: usize,
    /// Tokens the cache must be able to hold.
    #[arg(long, default_value_t = 512)]
    context: usize,
    /// The most tokens of a step, 0 for the whole context. Sliding-window layers hold the tokens of a step.
    #[arg(long, default_value_t = 0)]
    calls: usize,
    /// Points of the frontier.
    #[arg(long, default_value_t = 9)]
    points: usize,
    /// Steps measured at every point; 0 measures none.
    #[arg(long, default_value_t = 3)]
    steps: usize,
    /// File with the throughput of this machine; written where it does not exist.
    #[arg(long)]
    speeds: Option<PathBuf>,
    /// Draws the frontier into this SVG file.
    #[arg(long)]
    plot: Option<PathBuf>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(args.context > 1, "a context needs two tokens or more");
    let model = common::load(&args.model)?;
    let decoder = &model.decoder;
    let most = decoder.config().max_positions;
    ensure!(
        args.context <= most,
        "the model has {most} positions, the context {}",
        args.context
    );
    let (shape, throughput) = (decoder.shape(), throughput(&args, decoder)?);
    println!("throughput: {throughput}\n");
    let step_tokens = if args.calls == 0 {
        args.context
    } else {
        args.calls
    };
    let planner = Planner::new(&shape, &throughput, args.context)?.with_steps_of(step_tokens);

    let plan = planner.plan(args.budget)?;
    let cost = planner.cost(&plan)?;
    println!("budget of {} bytes: {plan}", args.budget);
    println!(
        "{} hot tokens, replays in chunks of {}",
        plan.hot(),
        plan.chunk()
    );
    println!(
        "{cost}\npredicted: {:.4} s a step\n",
        cost.seconds(&throughput)
    );

    let full = FullKv::new(&shape);
    let everything = measured(&args, decoder, Box::new(full), step_tokens)?;
    let bar = ProgressBar::new(args.points as u64).with_style(ProgressStyle::with_template(
        "{bar:40} {pos}/{len} points, {eta} left",
    )?);
    let mut points = Vec::new();
    for budget in frontier::budgets(&planner, args.points) {
        let plan = planner.plan(budget)?;
        let config = ResidualConfig::new(plan.clone()).with_byte_budget(budget);
        let cache = ResidualCheckpoint::new(&shape, decoder.conformance(), config)?;
        let cost = planner.cost(&plan)?;
        points.push(Point {
            budget,
            predicted: cost.seconds(&throughput),
            cost,
            measured: measured(&args, decoder, Box::new(cache), step_tokens)?,
            plan,
        });
        bar.inc(1);
    }
    bar.finish_and_clear();
    print!("{}", frontier::table(&points, everything));
    if let Some(path) = &args.plot {
        let name = args
            .model
            .file_name()
            .map_or_else(String::new, |n| n.to_string_lossy().into());
        let title = format!("{name}: a step at {} tokens", args.context);
        frontier::draw(path, &title, &points)?;
    }
    Ok(())
}

/// A number of bytes with or without a unit.
fn bytes(text: &str) -> Result<usize> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: usize = match &text[digits.len()..] {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        unit => return Err(anyhow!("{unit:?} is not B, KiB, MiB or GiB")),
    };
    let number: f64 = digits
        .trim()
        .parse()
        .with_context(|| format!("{digits:?} is no number"))?;
    ensure!(
        number.is_finite() && number >= 0.0,
        "{number} is no number of bytes"
    );
    Ok((number * unit as f64) as usize)
}

/// The throughput that is stored, or measured now.
fn throughput(args: &Args, decoder: &Decoder) -> Result<Throughput> {
    if let Some(stored) = args.speeds.as_ref().filter(|path| path.exists()) {
        return Ok(fs::read_to_string(stored)?.trim().parse()?);
    }
    let shape = decoder.shape();
    let throughput = Throughput::measure(&shape, decoder.device(), args.context, |layer| {
        decoder.at(layer)
    })?;
    if let Some(path) = &args.speeds {
        fs::write(path, format!("{throughput}\n"))?;
    }
    Ok(throughput)
}

/// The median time of the step that fills the context.
fn measured(
    args: &Args,
    decoder: &Decoder,
    mut cache: Box<dyn CacheBackend>,
    step_tokens: usize,
) -> Result<Option<f64>> {
    if args.steps == 0 {
        return Ok(None);
    }
    let vocab = decoder.config().vocab;
    let ids: Vec<u32> = (0..args.context).map(|i| (i * 37 % vocab) as u32).collect();
    let (last, prompt) = ids.split_last().context("a context has tokens")?;
    for step in prompt.chunks(step_tokens) {
        decoder.forward(Input::from(step).last_only(), cache.as_mut())?;
    }
    let mut times = Vec::new();
    for _ in 0..args.steps {
        let start = Instant::now();
        decoder
            .forward(Input::from(&[*last][..]), cache.as_mut())?
            .into_data();
        times.push(start.elapsed().as_secs_f64());
        cache.truncate(&[prompt.len()])?;
    }
    times.sort_unstable_by(f64::total_cmp);
    Ok(Some(times[times.len() / 2]))
}
