#![cfg_attr(
    all(feature = "pretrained", feature = "session", feature = "text"),
    doc = include_str!("../README.md")
)]
#![cfg_attr(
    not(all(feature = "pretrained", feature = "session", feature = "text")),
    doc = "KV-cache backends behind one trait; start at [`cache`]."
)]
#![cfg_attr(docsrs, feature(doc_cfg))]

// Leaves: bytes by part, positions as data, what tells models apart, files.
mod fields;
#[cfg(any(feature = "pretrained", feature = "session", feature = "text"))]
mod files;
#[cfg(any(feature = "model", feature = "session"))]
mod fingerprint;
pub mod memory;
pub mod positions;

// The operations whose bits must repeat, and a probe that measures whether they do.
pub mod exact;

// The contract between a decoder and its cache. Read this first.
pub mod cache;

// Where entries are stored: for authors of backends.
pub mod storage;

// What is evicted: for authors of policies. Has every backend but `ResidualCheckpoint`.
pub mod policy;

// What is dropped and rebuilt, to the bit: `ResidualCheckpoint`.
pub mod residual;

// What a `ResidualCheckpoint` costs, and the plan with the least predicted time within a byte budget.
pub mod planner;

// The decoder, and what surrounds it; a feature each.
#[cfg(feature = "generate")]
pub mod generate;
#[cfg(feature = "model")]
pub mod model;
#[cfg(feature = "pretrained")]
pub mod pretrained;
#[cfg(feature = "session")]
pub mod session;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(feature = "text")]
pub mod text;

pub use burn;
pub use cache::CacheBackend;
#[cfg(any(feature = "model", feature = "session"))]
pub use fingerprint::Fingerprint;
#[cfg(feature = "model")]
pub use model::Decoder;
pub use policy::{FullKv, H2o, SnapKv, StreamingLlm, Tova, Window};
pub use residual::ResidualCheckpoint;

/// Documents that are not about one item.
pub mod _documentation {
    #[doc = include_str!("../docs/design.md")]
    pub mod design {}

    #[doc = include_str!("../docs/adding-a-backend.md")]
    pub mod adding_a_backend {}

    #[doc = include_str!("../docs/using-in-your-engine.md")]
    pub mod using_in_your_engine {}

    // Their code blocks are tested; to read, they are in the repository.
    #[cfg(doctest)]
    mod tested {
        #[doc = include_str!("../docs/benchmarks.md")]
        mod benchmarks {}

        #[doc = include_str!("../docs/memory.md")]
        mod memory {}

        #[doc = include_str!("../docs/reproduction.md")]
        mod reproduction {}

        #[doc = include_str!("../docs/trace.md")]
        mod trace {}

        #[doc = include_str!("../CHANGELOG.md")]
        mod changelog {}
    }
}
