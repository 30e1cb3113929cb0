//! Session files: a cache written to one safetensors file, and read back.
//!
//! A file holds everything a backend needs to continue ([`State`](crate::cache::State)) and what it belongs to: the
//! weights ([`Fingerprint`](crate::fingerprint::Fingerprint)), the backend, its options, the model's sizes and dtypes,
//! and the version of the form. Every tensor has a checksum (XXH3), and all of these fields together have one.
//! Checksums detect damage, not forgery.
//!
//! A cache that is read back continues with the same bits as long as the kernels are the same. Those of this crate are
//! the same on every CPU.
//!
//! ```
//! use kv_direct::{CacheBackend, Window};
//! use kv_direct::session::{self, SessionError};
//! # use kv_direct::{burn::tensor::Device, model::{Decoder, DecoderConfig}};
//! # let device = Device::flex();
//! # let decoder = Decoder::from_weights(DecoderConfig::new(97, 64, 3, 4, 2), &device, |_, shape| {
//! #     Ok::<_, std::convert::Infallible>(vec![0.01; shape.iter().product()])
//! # })?;
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("chat.safetensors");
//!
//! let model = decoder.fingerprint();
//! let mut cache = Window::new(&decoder.shape(), 2)?;
//! decoder.forward(&[3, 1, 4][..], &mut cache)?;
//! session::save(&path, &cache, &model)?;
//!
//! let mut other = Window::new(&decoder.shape(), 2)?;
//! session::load(&path, &mut other, &model, &device)?;
//! assert_eq!(other.lengths(), [3]);
//! assert_eq!(other.memory(), cache.memory());
//!
//! let mut wider = Window::new(&decoder.shape(), 5)?;
//! let refused = session::load(&path, &mut wider, &model, &device).unwrap_err();
//! assert!(matches!(refused, SessionError::Cache { .. }), "the file has a window of 2");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The form of a file
//! This is version 2, the first that is released. Every later version of this crate reads it. A file of a version that
//! is not known is refused ([`SessionError::Version`]).
//!
//! A file is a safetensors file: the length of the header in 8 bytes; the header, in JSON; then the elements of all
//! tensors, without gaps. Numbers have their lowest byte first, and the last dimension of a tensor changes first. The
//! header has no spaces, but at its end, so that its length is a multiple of 8. It has `__metadata__` first, with its
//! fields sorted by name, then the tensors in the order of their elements: the dtype with the largest elements first,
//! then by name. Names are sorted by their bytes. So the same content is always the same bytes. A reader relies on no
//! order, and ignores fields and tensors that it does not know.
//!
//! ## Fields
//! The values in `__metadata__` are text. Numbers are decimal, without leading zeros or exponents.
//!
//! | field | value |
//! |---|---|
//! | `format` | `kv-direct session` |
//! | `version` | `2` |
//! | `fingerprint` | the [`Fingerprint`](crate::fingerprint::Fingerprint) of the model, 32 hexadecimal digits |
//! | `backend` | one of the next table, or that of another crate |
//! | `model.layers`, `model.hidden`, `model.heads`, `model.kv_heads`, `model.head_dim` | the sizes of the model |
//! | `model.dtype`, `model.cache_dtype` | the dtype of residuals, and of keys and values: `f64`, `f32`, `f16` or `bf16` |
//! | `model.windows` | for each layer its window, or `full`, with commas between; absent if all are `full` |
//! | `option.NAME` | an option of the backend |
//! | `checksum.NAME` | of the tensor NAME, over the line `NAME DTYPE SHAPE` and its elements; SHAPE has commas between its numbers |
//! | `checksum` | over all other fields: a line `LENGTH NAME LENGTH VALUE` for each, sorted by name; lengths are in bytes |
//!
//! A checksum is XXH3 (64 bits, seed 0) in 16 hexadecimal digits. A line ends in a line feed. Backends have these
//! options:
//!
//! | `backend` | options |
//! |---|---|
//! | `full_kv`, `layer_stores` | none |
//! | `window` | `size`, a budget |
//! | `streaming_llm` | `sinks`; `recent`, a budget; `indexing`: `cache_index` or `original` |
//! | `h2o` | `budget` and `recent`, budgets; `sinks`; `group` |
//! | `snap_kv` | `budget`, a budget; `window`; `kernel`; `pooling`: `average` or `max`; `group` |
//! | `tova` | `budget`, a budget; `protect_last`: `true` or `false` |
//! | `residual` | `hot`: a number or `all`; `retain`: for each layer `keys_values`, `residual` or `nothing`, with commas between; `byte_budget`: a number, absent if there is none |
//!
//! A budget is a number of entries, or `prompt*S` for the share S of the prompt. `group` is `mean`, `sum` or `max`. An
//! option that a later version of this crate adds is absent while it has the value that it has today.
//!
//! ## Tensors
//! L is a layer and S a sequence, both counted from 0. A tensor without elements is absent, unless the table says
//! otherwise. None of them depends on how entries lie in memory.
//!
//! | tensor | dtype and shape | content |
//! |---|---|---|
//! | `lengths` | U64 `[sequences]` | processed tokens; never absent |
//! | `layer.L.positions.S` | U64 `[lists · entries]` | the positions held, rising; in full-attention layers of `h2o` and `snap_kv` a list for each KV head, else one list. Where a list is shorter than another, 2⁶⁴ - 1 fills it up |
//! | `layer.L.keys.S` | `model.cache_dtype`, `[kv_heads, entries, head_dim]` | the keys in the order of the positions, normed and rotated; zeros where a list is filled up |
//! | `layer.L.values.S` | as the keys | the values |
//! | `layer.L.slots.S` | U64 `[lists · entries]` | the place of each entry in the sums of attention, filled up as the positions; see below |
//! | `layer.L.scores.S` | F32 `[lists · entries]` | the score of each entry, 0 where a list is filled up; absent if nothing was scored |
//! | `prompts` | U64 `[sequences]` | not in `residual`: the tokens of the prompt, 2⁶⁴ - 1 while more of it follows; never absent |
//! | `layer.L.queries.S` | F32 `[queries · heads · lengths[S]]` | of an unfinished prompt: the probability that each of its newest queries, oldest first, gave to each token in each head; 0 for newer tokens |
//! | `layer.L.sinks.S` | `model.cache_dtype`, `[kv_heads, sinks, head_dim]` | `streaming_llm` with `cache_index`, once entries were evicted: the keys of the sinks before they were rotated for the second time |
//! | `parked` | U64 `[1]` | `residual`: 1 if everything that can be rebuilt was dropped, else 0 |
//! | `ids` | U32 `[tokens]` | `residual` that replays from token ids: the ids of all sequences, one sequence after another; never absent there |
//! | `layer.L.residuals.S` | `model.dtype`, `[1, lengths[S], hidden]` | `residual`: the residual of every token that enters a layer that retains `residual` |
//!
//! Sums of floats depend on their order, and attention sums in the order of places. Where an entry was evicted, a later
//! one has its place. Without `slots`, the place of an entry is its index among the positions. In sliding-window layers,
//! and in those that `residual` rebuilds, it is the position instead, and `slots` is absent. A reader that only needs the
//! content ignores `slots`.

mod error;
mod facts;
mod header;
mod part;
mod read;
mod write;

pub use self::{error::SessionError, read::load, write::save};

/// The format in the header of a session.
const FORMAT: &str = "kv-direct session";

/// The version of the format that is written and read.
const VERSION: u32 = 2;
