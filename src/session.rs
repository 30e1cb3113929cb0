//! Session files: a cache written to one safetensors file, and read back.
//!
//! A file holds everything a backend needs to continue ([`State`](crate::cache::State)) and what it belongs to: the
//! weights ([`Fingerprint`](crate::fingerprint::Fingerprint)), the backend, its options, the model's shape and dtype,
//! and the version of the format. Every tensor has a checksum (XXH3), and all of these facts together have one.
//! Checksums detect damage, not forgery.
//!
//! A cache that is read back continues with the same bits as long as the kernels are the same: on one kind of
//! machine, with one build.
//!
//! # The file
//! Keys, values, residuals, positions, ids and scores are tensors. A [`Tensor`](crate::cache::StateValue::Tensor) has
//! four dimensions, in the dtype of the model. The lists have one: integers in U64, ids in U32, scores in F32.
//!
//! The header's `__metadata__` has these keys:
//! * `format` (`kv-direct session`), `version`, `written_by`, `fingerprint`, `backend`, `model`
//! * `option.NAME` for every option
//! * `checksum.NAME` for every tensor: the XXH3 of the line `NAME DTYPE [SHAPE]` and the tensor's bytes
//! * `checksum`: the XXH3 of a line `LENGTH KEY LENGTH VALUE` for every other key, sorted
//!
//! All checksums are 16 hexadecimal digits.
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

mod error;
mod facts;
mod read;
mod write;

pub use self::{error::SessionError, read::load, write::save};

/// The format in the header of a session.
const FORMAT: &str = "kv-direct session";

/// The version of the format that is written. It is also the newest that can be read.
const VERSION: u32 = 1;
