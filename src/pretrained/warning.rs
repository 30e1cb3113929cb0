//! Warnings about a model folder that can still be loaded.

use std::{fmt, path::PathBuf};

/// Something that a model folder does not state, or states inconsistently, and how it was interpreted.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Warning {
    /// The configuration states that the head is the embedding, but another head is stored. The stored head is
    /// ignored.
    HeadIgnored {
        /// The stored head.
        tensor: String,
    },
    /// The configuration states that the head is not the embedding, but no head is stored. The head is the embedding.
    HeadAbsent {
        /// The tensor that is missing.
        tensor: String,
    },
    /// The folder has `model.safetensors` and an index of other files. The index is ignored.
    IndexIgnored {
        /// The index.
        index: PathBuf,
    },
    /// The configuration states no rotary base. The family's first one is used.
    DefaultTheta {
        /// The base.
        theta: f64,
    },
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HeadIgnored { tensor } => write!(
                f,
                "{tensor} differs from the embedding and is ignored, since tie_word_embeddings is true"
            ),
            Self::HeadAbsent { tensor } => write!(
                f,
                "{tensor} is not stored, so the head is the embedding although tie_word_embeddings is false"
            ),
            Self::IndexIgnored { index } => write!(
                f,
                "{} is ignored, since there is a model.safetensors beside it",
                index.display()
            ),
            Self::DefaultTheta { theta } => {
                write!(f, "rope_theta is absent and taken to be {theta}")
            }
        }
    }
}
