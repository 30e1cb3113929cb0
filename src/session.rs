//! Session files: a cache written to one safetensors file, and read back.
//!
//! A file holds everything a backend needs to go on ([`State`](crate::cache::State)) and says what it
//! belongs to: the weights ([`Fingerprint`]), the backend, its options, the model's shape and dtype, and
//! the version of the format. Every tensor and the whole of these facts carry a checksum (XXH3), which
//! finds damage and no forgery.
//!
//! # The file
//! Rows, positions, ids and scores are tensors: a [`Tensor`](crate::cache::Entry::Tensor) has four
//! dimensions in the dtype of the model, the lists have one, integers in U64, ids in U32, scores in F32.
//! The header's `__metadata__` says `format` (`kv-direct session`), `version`, `written_by`, `fingerprint`,
//! `backend`, `option.NAME` for every option, `model` and `checksum.NAME` for every tensor: the XXH3 of the line `NAME DTYPE
//! [SHAPE]` and its bytes. `checksum` is that of a line `LENGTH KEY LENGTH VALUE` for every other fact, sorted.
//! All of them are 16 hexadecimal digits.
//!
//! What is read back goes on with the same bits as long as the kernels are the same: on one kind of
//! machine, with one build.
//!
//! ```
//! use kv_direct::cache::{CacheBackend, Window};
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
//! assert_eq!((other.position(0), other.memory()), (3, cache.memory()));
//!
//! let mut wider = Window::new(&decoder.shape(), 5)?;
//! let refused = session::load(&path, &mut wider, &model, &device).unwrap_err();
//! assert!(matches!(refused, SessionError::Cache { .. }), "the file is of a window of 2");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod facts;
mod read;
mod write;

pub use self::{error::SessionError, read::load, write::save};

/// Says that a safetensors file is a session.
const FORMAT: &str = "kv-direct session";

/// The version of the format that is written, and the newest that is read.
const VERSION: u32 = 1;
