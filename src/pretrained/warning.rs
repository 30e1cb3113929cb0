//! What a folder says that a reader may not expect. It loads all the same.

use std::fmt;

/// Something a model folder leaves open or contradicts itself in, and how it was taken.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Warning {
    /// The configuration ties the head to the embedding, and a head that differs from it is stored.
    /// The stored head is ignored.
    HeadIgnored {
        /// The stored head.
        tensor: String,
    },
    /// The configuration says the head is not the embedding, and none is stored. The head is the
    /// embedding.
    HeadAbsent {
        /// The tensor that is not there.
        tensor: String,
    },
    /// The configuration names no rotary base: the family's first one is used.
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
            Self::DefaultTheta { theta } => {
                write!(f, "rope_theta is absent and taken to be {theta}")
            }
        }
    }
}
