//! Greedy runs against a reference, and what they differ by.

use std::time::Instant;

use anyhow::{Context, Result};
use indicatif::ProgressBar;
use kv_direct::{
    cache::{CacheBackend, CacheError, Step, TokenIds},
    generate::argmax,
    memory::MemoryReport,
    model::{Decoder, Input},
    planner::Cost,
    policy::FullKv,
    residual::Plan,
};
use serde_json::{Value, json};

use crate::{
    bits::same_bits,
    kind::Kind,
    kl::{kl, log_softmax},
};

/// Rows of a prompt whose logits are computed at a time.
const HEAD_ROWS: usize = 64;

/// What all runs of a comparison share.
pub(crate) struct Setup<'a> {
    pub(crate) decoder: &'a Decoder,
    pub(crate) chunk: Option<usize>,
}

impl Setup<'_> {
    /// Feeds a prompt.
    fn prefill(
        &self,
        cache: &mut dyn CacheBackend,
        prompt: &[u32],
        chunk: usize,
    ) -> Result<Prefill> {
        let vocab = self.decoder.config().vocab;
        let (mut last, mut hashes, mut most, mut ms) = (Vec::new(), Vec::new(), 0, 0.0);
        let steps = prompt.len().div_ceil(chunk);
        let decoder = self.decoder;
        for (index, tokens) in prompt.chunks(chunk).enumerate() {
            let step = Step::new(
                TokenIds::from(tokens),
                &[cache.lengths().first().copied().unwrap_or(0)],
            )?
            .with_more_follows(index + 1 < steps);
            let start = Instant::now();
            let residual = decoder.embed(step.tokens())?;
            cache.begin(&step)?;
            let layers = 0..decoder.config().layers.len();
            let residual = decoder.run(layers, residual, &step, cache)?;
            cache.commit()?;
            if index + 1 == steps {
                let newest = tokens.len() - 1..tokens.len();
                let _ = decoder.logits(residual.clone().slice_dim(1, newest));
            }
            ms += start.elapsed().as_secs_f64() * 1e3;
            most = most.max(peak(cache));
            // Logits of a whole prompt at once would be more than a small model itself.
            for from in (0..tokens.len()).step_by(HEAD_ROWS) {
                let to = (from + HEAD_ROWS).min(tokens.len());
                let rows = residual.clone().slice_dim(1, from..to);
                let logits: Vec<f32> = decoder.logits(rows).try_into_vec_as()?;
                hashes.extend(logits.chunks(vocab).map(hash));
                last = logits[logits.len() - vocab..].to_vec();
            }
        }
        Ok(Prefill {
            last,
            hashes,
            most,
            ms,
        })
    }

    fn feed(&self, cache: &mut dyn CacheBackend, input: impl Into<Input>) -> Result<Vec<f32>> {
        Ok(self
            .decoder
            .forward(input.into().last_only(), cache)?
            .try_into_vec_as()?)
    }

    /// Loss in nats of each token of `continuation`. `logits` are those for the first.
    fn losses(
        &self,
        mut cache: Box<dyn CacheBackend>,
        mut logits: Vec<f32>,
        continuation: &[u32],
        bar: &ProgressBar,
    ) -> Result<Vec<f64>> {
        let mut losses = Vec::with_capacity(continuation.len());
        for (index, &token) in continuation.iter().enumerate() {
            losses.push(-log_softmax(&logits)[token as usize]);
            bar.inc(1);
            if index + 1 < continuation.len() {
                logits = self.feed(&mut cache, &[token][..])?;
            }
        }
        Ok(losses)
    }
}

/// A prompt that was fed.
struct Prefill {
    /// The logits of its last token.
    last: Vec<f32>,
    /// A hash of the bits of each token's logits.
    hashes: Vec<u64>,
    /// The most bytes held meanwhile.
    most: usize,
    /// Milliseconds of its steps, with the logits of the last token only.
    ms: f64,
}

/// A prompt, and the text that follows it.
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<u32>,
    /// Fed one by one to measure how well each is predicted.
    pub(crate) continuation: Vec<u32>,
}

/// The run of `FullKv` that others are compared with: the logits each token was chosen from.
pub(crate) struct Reference {
    /// Hashes of the prompt's logits.
    prompt: Vec<u64>,
    logits: Vec<Vec<f32>>,
    tokens: Vec<u32>,
}

/// What was measured of one backend at one budget, over one prompt or several.
pub(crate) struct Measurement {
    /// Kind and options of its cache.
    pub(crate) cache: Value,
    pub(crate) budget: Option<usize>,
    /// Tokens of every prompt.
    pub(crate) context: usize,
    /// Share of tokens equal to the reference's, by prompt.
    pub(crate) matches: Vec<f64>,
    /// Losses in nats of the tokens that follow each prompt.
    losses: Vec<f64>,
    pub(crate) first_divergence: Option<usize>,
    pub(crate) forced: Forced,
    pub(crate) bits_equal: bool,
    /// At the end of the run; of several prompts the largest.
    pub(crate) memory: MemoryReport,
    pub(crate) total_peak: usize,
    pub(crate) per_old_token: usize,
    /// Milliseconds of each prompt, with the logits of its last token only.
    prefills_ms: Vec<f64>,
    pub(crate) steps_ms: Vec<f64>,
    /// The plan, if there is one, and its [`Cost`] at the end of the run.
    pub(crate) plan: Option<(Plan, Cost)>,
}

/// Differences of logits where the reference's tokens are fed.
#[derive(Default)]
pub(crate) struct Forced {
    pub(crate) max_abs_dlogit: f64,
    pub(crate) max_kl: f64,
    kl: f64,
    top1: usize,
    count: usize,
}

impl Reference {
    /// Decodes `new` tokens with `FullKv`.
    pub(crate) fn run(
        setup: &Setup<'_>,
        prompt: &Prompt,
        new: usize,
        bar: &ProgressBar,
    ) -> Result<(Self, Measurement)> {
        let mut cache = FullKv::new(&setup.decoder.shape());
        let Prefill {
            last: first,
            hashes,
            most,
            ms,
        } = setup.prefill(&mut cache, &prompt.tokens, prompt.tokens.len())?;
        let losses = setup.losses(cache.fork(), first.clone(), &prompt.continuation, bar)?;
        let mut logits = vec![first];
        let mut tokens = vec![choice(&logits[0])?];
        let (mut steps_ms, mut total_peak) = (Vec::new(), most);
        while tokens.len() < new {
            bar.inc(1);
            let start = Instant::now();
            logits.push(setup.feed(&mut cache, &tokens[tokens.len() - 1..])?);
            steps_ms.push(start.elapsed().as_secs_f64() * 1e3);
            tokens.push(choice(&logits[tokens.len()])?);
            total_peak = total_peak.max(peak(&cache));
        }
        bar.inc(1);
        let mut forced = Forced::default();
        logits.iter().for_each(|row| forced.add(row, row));
        let per_old_token = setup.decoder.shape().keys_values_per_old_token();
        let measurement = Measurement {
            cache: json!(Kind::Full {}),
            budget: None,
            context: prompt.tokens.len(),
            matches: vec![1.0],
            losses,
            first_divergence: None,
            forced,
            bits_equal: true,
            memory: cache.memory(),
            total_peak,
            per_old_token,
            prefills_ms: vec![ms],
            steps_ms,
            plan: None,
        };
        Ok((
            Self {
                prompt: hashes,
                logits,
                tokens,
            },
            measurement,
        ))
    }

    /// Decodes freely with another backend. Where its choice first differs from the reference's, a
    /// fork goes on with the reference's tokens, so that logits are compared over the same text.
    pub(crate) fn compare(
        &self,
        setup: &Setup<'_>,
        kind: &Kind,
        budget: usize,
        prompt: &Prompt,
        bar: &ProgressBar,
    ) -> Result<Measurement> {
        let mut free = kind.cache(setup.decoder)?;
        let mut forced: Option<Box<dyn CacheBackend>> = None;
        let chunk = setup.chunk.unwrap_or(prompt.tokens.len());
        let Prefill {
            last: mut logits,
            hashes,
            most,
            ms,
        } = setup.prefill(&mut free, &prompt.tokens, chunk)?;
        let losses = setup.losses(free.fork(), logits.clone(), &prompt.continuation, bar)?;
        let mut forced_logits = logits.clone();
        let mut after_first = None;
        let mut row = Measurement {
            cache: json!(kind),
            budget: Some(budget),
            context: prompt.tokens.len(),
            matches: Vec::new(),
            losses,
            first_divergence: None,
            forced: Forced::default(),
            bits_equal: hashes == self.prompt,
            memory: MemoryReport::default(),
            total_peak: most,
            per_old_token: 0,
            prefills_ms: vec![ms],
            steps_ms: Vec::new(),
            plan: None,
        };
        let mut matching = 0;
        for (step, (expected, &token)) in self.logits.iter().zip(&self.tokens).enumerate() {
            row.bits_equal &= same_bits(&forced_logits, expected);
            row.forced.add(expected, &forced_logits);
            let own = choice(&logits)?;
            matching += usize::from(own == token);
            if own != token && forced.is_none() {
                row.first_divergence = Some(step);
                forced = Some(free.fork());
            }
            bar.inc(1);
            if step + 1 == self.tokens.len() {
                break;
            }
            let start = Instant::now();
            logits = setup.feed(&mut free, &[own][..])?;
            row.steps_ms.push(start.elapsed().as_secs_f64() * 1e3);
            row.total_peak = row.total_peak.max(peak(&free));
            // By now sliding-window layers have evicted what their windows no longer need.
            after_first = after_first.or_else(|| Some(in_use(&free.memory())));
            forced_logits = match &mut forced {
                Some(cache) => setup.feed(cache, &[token][..])?,
                None => logits.clone(),
            };
        }
        row.matches.push(matching as f64 / self.tokens.len() as f64);
        row.memory = free.memory();
        let shape = setup.decoder.shape();
        let cost = |plan: Plan| Ok::<_, CacheError>((plan.cost(&shape, free.lengths()[0])?, plan));
        let cost = kind.plan(&shape).map(cost).transpose()?;
        row.plan = cost.map(|(cost, plan)| (plan, cost));
        let (fed, at_end) = (
            self.tokens.len().saturating_sub(2).max(1),
            in_use(&row.memory),
        );
        row.per_old_token = at_end.saturating_sub(after_first.unwrap_or(at_end)) / fed;
        Ok(row)
    }
}

impl Measurement {
    /// Adds the measurement of the same backend over another prompt.
    pub(crate) fn add(&mut self, more: Self) {
        self.matches.extend(more.matches);
        self.losses.extend(more.losses);
        self.first_divergence = match (self.first_divergence, more.first_divergence) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
        self.forced.max_abs_dlogit = self.forced.max_abs_dlogit.max(more.forced.max_abs_dlogit);
        self.forced.max_kl = self.forced.max_kl.max(more.forced.max_kl);
        self.forced.kl += more.forced.kl;
        self.forced.top1 += more.forced.top1;
        self.forced.count += more.forced.count;
        self.bits_equal &= more.bits_equal;
        if more.memory.total() > self.memory.total() {
            self.memory = more.memory;
        }
        self.total_peak = self.total_peak.max(more.total_peak);
        self.per_old_token = self.per_old_token.max(more.per_old_token);
        self.prefills_ms.extend(more.prefills_ms);
        self.steps_ms.extend(more.steps_ms);
    }

    pub(crate) fn token_match(&self) -> f64 {
        mean(&self.matches)
    }

    /// Standard deviation of the match over prompts; none for a single one.
    pub(crate) fn token_match_spread(&self) -> Option<f64> {
        let (middle, count) = (self.token_match(), self.matches.len());
        let squares = self.matches.iter().map(|m| (m - middle).powi(2));
        (count > 1).then(|| (squares.sum::<f64>() / (count - 1) as f64).sqrt())
    }

    /// The exponential of the mean loss; none where no text was scored.
    pub(crate) fn perplexity(&self) -> Option<f64> {
        (!self.losses.is_empty()).then(|| mean(&self.losses).exp())
    }

    /// Median time of a decode step; 0 where none was made.
    pub(crate) fn ms_per_token(&self) -> f64 {
        median(&self.steps_ms)
    }

    /// Median time of a prompt.
    pub(crate) fn prefill_ms(&self) -> f64 {
        median(&self.prefills_ms)
    }

    /// Tokens a second of that prompt.
    pub(crate) fn prefill_rate(&self) -> f64 {
        self.context as f64 / self.prefill_ms() * 1e3
    }
}

impl Forced {
    pub(crate) fn mean_kl(&self) -> f64 {
        self.kl / self.count as f64
    }

    /// Share of steps in which both would have chosen the same token.
    pub(crate) fn top1(&self) -> f64 {
        self.top1 as f64 / self.count as f64
    }

    fn add(&mut self, expected: &[f32], found: &[f32]) {
        let differences = expected
            .iter()
            .zip(found)
            .map(|(a, b)| f64::from((a - b).abs()));
        self.max_abs_dlogit = differences.fold(self.max_abs_dlogit, f64::max);
        let kl = kl(expected, found);
        self.kl += kl;
        self.max_kl = self.max_kl.max(kl);
        self.top1 += usize::from(argmax(expected) == argmax(found));
        self.count += 1;
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// 0 where nothing was measured.
fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn choice(logits: &[f32]) -> Result<u32> {
    argmax(logits).context("a logit is not finite")
}

/// The most bytes held within the last step.
fn peak(cache: &dyn CacheBackend) -> usize {
    let memory = cache.memory();
    memory.total() + memory.scratch_peak
}

/// Bytes in use, of all parts.
fn in_use(report: &MemoryReport) -> usize {
    report.keys_values + report.residuals + report.tokens + report.scores
}

/// FNV-1a over the bits of a row of logits.
fn hash(logits: &[f32]) -> u64 {
    let fold =
        |hash: u64, logit: &f32| (hash ^ u64::from(logit.to_bits())).wrapping_mul(0x0100_0000_01b3);
    logits.iter().fold(0xcbf2_9ce4_8422_2325, fold)
}
