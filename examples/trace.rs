//! Runs a script of operations against a model folder and writes down what the cache did:
//! `cargo run --release --example trace -- --model DIR --script SCRIPT.json --out OUT.safetensors`
//!
//! `docs/trace.md` describes script and output. The exit status is 2 when script or model cannot be
//! read and 0 when the script ran to its end, whatever was refused.

#[path = "common/kind.rs"]
mod kind;
#[path = "common/recorder.rs"]
mod recorder;

use std::{
    cell::OnceCell,
    collections::{BTreeMap, HashMap},
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result};
use burn::tensor::Device;
use clap::Parser;
use kind::Kind;
use kv_direct::{
    Fingerprint,
    cache::{CacheBackend, CacheError, CachedPositions, Draft, LayerIndex},
    memory::MemoryReport,
    model::{Decoder, Input},
    pretrained::load,
    session,
};
use recorder::{Read, Recorder};
use safetensors::{serialize, tensor::TensorView};
use serde::Deserialize;
use serde_json::{Value, json};

/// Runs a trace script.
#[derive(Parser)]
struct Args {
    /// Folder with config.json and safetensors.
    #[arg(long)]
    model: PathBuf,
    /// The script, JSON.
    #[arg(long)]
    script: PathBuf,
    /// Where logits (and keys and values) go.
    #[arg(long)]
    out: PathBuf,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Script {
    #[serde(default)]
    dtype: Dtype,
    #[serde(default)]
    logits: Logits,
    #[serde(default)]
    dump: Vec<Dump>,
    cache: Value,
    ops: Vec<Value>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "lowercase")]
enum Dtype {
    #[default]
    F32,
}

#[derive(Deserialize, Default, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Logits {
    #[default]
    All,
    Last,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Dump {
    KeysValues,
}

/// The operations there are.
#[derive(Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
enum Op {
    Feed {
        tokens: Vec<Vec<u32>>,
        #[serde(default = "yes")]
        last: bool,
    },
    Truncate {
        to: Lengths,
    },
    Checkpoint {},
    Restore {},
    Accept {},
    SelectRows {
        rows: Vec<usize>,
    },
    Park {},
    Save {
        path: PathBuf,
    },
    Load {
        path: PathBuf,
    },
    Clear {},
    Fork {
        name: String,
    },
    Use {
        name: String,
    },
}

/// One length for all sequences, or one for each.
#[derive(Deserialize)]
#[serde(untagged)]
enum Lengths {
    All(usize),
    Each(Vec<usize>),
}

impl Op {
    const NAMES: [&str; 12] = [
        "feed",
        "truncate",
        "checkpoint",
        "restore",
        "accept",
        "select_rows",
        "park",
        "save",
        "load",
        "clear",
        "fork",
        "use",
    ];

    fn read(op: &Value) -> Result<Self, Refusal> {
        if !Self::NAMES.iter().any(|name| op["op"] == *name) {
            return Err(Refusal::new(
                "unsupported",
                format!("operation {}", op["op"]),
            ));
        }
        Self::deserialize(op).map_err(|error| Refusal::new("bad_operation", error.to_string()))
    }
}

const fn yes() -> bool {
    true
}

/// Why an operation was refused: the name of the error, and its text.
#[derive(Clone)]
struct Refusal {
    kind: String,
    message: String,
}

impl Refusal {
    fn new(kind: &str, message: impl Into<String>) -> Self {
        Self {
            kind: kind.into(),
            message: message.into(),
        }
    }
}

impl<E: std::error::Error> From<E> for Refusal {
    /// The innermost variant's name, `CacheError::EmptyStep` as `empty_step`.
    fn from(error: E) -> Self {
        let debug = format!("{error:?}");
        let name = debug.strip_prefix("Cache(").unwrap_or(&debug);
        let mut kind = String::new();
        for letter in name.chars().take_while(char::is_ascii_alphanumeric) {
            if letter.is_ascii_uppercase() && !kind.is_empty() {
                kind.push('_');
            }
            kind.push(letter.to_ascii_lowercase());
        }
        // The format keeps the names it began with.
        let named = [
            ("sequences", "rows"),
            ("no_sequence", "no_row"),
            ("draft_open", "checkpoint_open"),
            ("no_draft", "no_checkpoint"),
        ];
        if let Some((_, format)) = named.iter().find(|(name, _)| *name == kind) {
            kind = (*format).into();
        }
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            message = format!("{message}: {cause}");
            source = cause.source();
        }
        Self { kind, message }
    }
}

type Cache = Recorder<Box<dyn CacheBackend>>;

fn cache(kind: &Value, decoder: &Decoder) -> Result<Box<dyn CacheBackend>, Refusal> {
    if !Kind::NAMES.iter().any(|known| kind["kind"] == *known) {
        return Err(Refusal::new("unsupported", format!("cache {kind}")));
    }
    let kind =
        Kind::deserialize(kind).map_err(|error| Refusal::new("bad_cache", error.to_string()))?;
    Ok(kind.cache(decoder)?)
}

/// A script on its way: the caches by name, and the tensors written so far.
struct Trace<'a> {
    decoder: &'a Decoder,
    /// Known once a session is saved or loaded.
    model: OnceCell<Fingerprint>,
    /// Where the script lies.
    folder: &'a Path,
    script: &'a Script,
    caches: HashMap<String, Cache>,
    current: String,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

impl Trace<'_> {
    fn run(&mut self, index: usize, op: Op) -> Result<(), Refusal> {
        let unknown =
            |name: &str| Refusal::new("unknown_name", format!("there is no cache {name}"));
        let Some(cache) = self.caches.get_mut(&self.current) else {
            return Err(unknown(&self.current));
        };
        let model = || self.model.get_or_init(|| self.decoder.fingerprint());
        match op {
            Op::Feed { tokens, last } => self.feed(index, tokens, last)?,
            Op::Truncate {
                to: Lengths::All(to),
            } => {
                let longest = cache.lengths().iter().copied().max().unwrap_or(0);
                if to > longest {
                    return Err(CacheError::TruncateBeyond { to, longest }.into());
                }
                let lengths = cache.lengths().iter();
                let to: Vec<usize> = lengths.map(|&length| to.min(length)).collect();
                cache.truncate(&to)?;
            }
            Op::Truncate {
                to: Lengths::Each(to),
            } => cache.truncate(&to)?,
            Op::Checkpoint {} => cache.begin_draft()?,
            Op::Restore {} => cache.end_draft(Draft::Discard)?,
            Op::Accept {} => cache.end_draft(Draft::Accept)?,
            Op::SelectRows { rows } => cache.select_sequences(&rows)?,
            Op::Park {} => cache.park()?,
            Op::Save { path } => session::save(&self.folder.join(path), cache, model())?,
            Op::Load { path } => {
                let device = self.decoder.device();
                session::load(&self.folder.join(path), cache, model(), device)?;
            }
            Op::Clear {} => cache.clear(),
            Op::Fork { name } => {
                let fork = Recorder::new(cache.fork(), !self.script.dump.is_empty());
                self.caches.insert(name, fork);
            }
            Op::Use { name } if self.caches.contains_key(&name) => self.current = name,
            Op::Use { name } => return Err(unknown(&name)),
        }
        Ok(())
    }

    fn feed(&mut self, index: usize, tokens: Vec<Vec<u32>>, last: bool) -> Result<(), Refusal> {
        let cache = self
            .caches
            .get_mut(&self.current)
            .expect("the caller has found it");
        let lengths: Vec<usize> = tokens.iter().map(Vec::len).collect();
        let mut input = Input::from(tokens).more_follows(!last);
        if self.script.logits == Logits::Last {
            input = input.last_only();
        }
        // Discards what a failed step recorded.
        cache.take();
        let logits = self.decoder.forward(input, cache)?;
        let [_, width, vocab] = logits.dims();
        let logits: Vec<f32> = logits.try_into_vec_as()?;
        for (sequence, length) in lengths
            .into_iter()
            .enumerate()
            .filter(|(_, length)| *length > 0)
        {
            let count = length.min(width);
            let data = logits[sequence * width * vocab..][..count * vocab].to_vec();
            self.tensors.insert(
                format!("logits.{index}.{sequence}"),
                (vec![count, vocab], data),
            );
        }
        for (layer, read) in cache.take().iter().enumerate() {
            self.dump(index, layer, read);
        }
        Ok(())
    }

    /// Keys and values as attention read them; shorter lists are filled up with zeros.
    fn dump(&mut self, index: usize, layer: usize, read: &Read) {
        let config = self.decoder.config();
        let width = config.head_dim;
        let longest = read.iter().flatten().map(Vec::len).max().unwrap_or(0);
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for entries in read.iter().flatten() {
            keys.extend(entries.iter().flat_map(|(_, key, _)| key));
            values.extend(entries.iter().flat_map(|(.., value)| value));
            let padding = (longest - entries.len()) * width;
            keys.resize(keys.len() + padding, 0.0);
            values.resize(values.len() + padding, 0.0);
        }
        let shape = vec![read.len(), config.kv_heads, longest, width];
        self.tensors
            .insert(format!("keys.{index}.{layer}"), (shape.clone(), keys));
        self.tensors
            .insert(format!("values.{index}.{layer}"), (shape, values));
    }

    /// What the current cache holds, as an output line has it. `scratch` is what the operation
    /// needed on top of it.
    fn state(&self, scratch: bool) -> Value {
        let Some(cache) = self.caches.get(&self.current) else {
            let nothing = memory(&MemoryReport::default(), false);
            return json!({ "position": [], "kept": [], "memory": nothing, "lossless": null });
        };
        let kept: Vec<CachedPositions> = (0..self.decoder.config().layers.len())
            .map(|layer| cache.cached(LayerIndex::new(layer)))
            .collect();
        let position = cache.lengths().to_vec();
        let lists = |kept: &CachedPositions, sequence: usize| match kept.sequence(sequence) {
            [shared] => json!(shared),
            heads => json!(heads),
        };
        let windows = self.decoder.shape().windows;
        let whole = |(layer, kept): (usize, &CachedPositions), sequence: usize| {
            let next = position[sequence];
            let seen = windows[layer].map_or(next, |window| next.min(window.get() - 1));
            kept.sequence(sequence)
                .iter()
                .all(|list| list.len() == seen)
        };
        let sequences = 0..position.len();
        json!({
            "position": position,
            "kept": kept.iter().map(|k| sequences.clone().map(|i| lists(k, i)).collect()).collect::<Vec<Vec<_>>>(),
            "memory": memory(&cache.memory(), scratch),
            "lossless": kept.iter().enumerate().all(|k| sequences.clone().all(|i| whole(k, i))),
        })
    }
}

fn memory(report: &MemoryReport, scratch: bool) -> Value {
    json!({
        "keys_values": report.keys_values, "residuals": report.residuals, "tokens": report.tokens,
        "scores": report.scores, "reserved": report.reserved, "total": report.total(),
        "scratch_peak": if scratch { report.scratch_peak } else { 0 },
    })
}

fn run(args: &Args) -> Result<()> {
    let text =
        fs::read(&args.script).with_context(|| format!("reading {}", args.script.display()))?;
    let script: Script =
        serde_json::from_slice(&text).with_context(|| format!("{}", args.script.display()))?;
    let Dtype::F32 = script.dtype;
    let model = load(&args.model, &Device::flex())?;
    let decoder = &model.decoder;
    let recording = !script.dump.is_empty();
    let (main, refused) = match cache(&script.cache, decoder) {
        Ok(cache) => (
            Some(("main".to_owned(), Recorder::new(cache, recording))),
            None,
        ),
        Err(refusal) => (None, Some(refusal)),
    };
    let (caches, current) = (main.into_iter().collect(), "main".to_owned());
    let mut trace = Trace {
        decoder,
        model: OnceCell::new(),
        folder: args.script.parent().unwrap_or(Path::new("")),
        script: &script,
        caches,
        current,
        tensors: BTreeMap::new(),
    };
    let mut stdout = io::stdout().lock();
    let mut state = trace.state(false);
    for (index, op) in script.ops.iter().enumerate() {
        let feeds = op["op"] == "feed";
        let done = match &refused {
            Some(refusal) => Err(refusal.clone()),
            None => Op::read(op).and_then(|op| trace.run(index, op)),
        };
        // A refused operation leaves everything as the line before has it.
        if done.is_ok() {
            state = trace.state(feeds);
        }
        let error = done
            .err()
            .map(|Refusal { kind, message }| json!({ "kind": kind, "message": message }));
        let mut line = json!({ "op": index, "kind": op["op"], "error": error });
        if let (Value::Object(line), Value::Object(state)) = (&mut line, &state) {
            line.extend(state.clone());
        }
        writeln!(stdout, "{line}").context("writing to stdout")?;
    }
    let bytes: BTreeMap<_, _> = trace
        .tensors
        .iter()
        .map(|(name, (shape, data))| {
            (
                name,
                (
                    shape,
                    data.iter()
                        .flat_map(|x| x.to_le_bytes())
                        .collect::<Vec<u8>>(),
                ),
            )
        })
        .collect();
    let views = bytes
        .iter()
        .map(|(name, (shape, data))| {
            Ok((
                name,
                TensorView::new(safetensors::Dtype::F32, shape.to_vec(), data)?,
            ))
        })
        .collect::<Result<Vec<_>>>()?;
    fs::write(&args.out, serialize(views, None)?)
        .with_context(|| format!("writing {}", args.out.display()))
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::from(2)
        }
    }
}
