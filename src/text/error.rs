//! What can go wrong between text and ids.

use std::{error::Error, io, path::PathBuf};

use crate::generate::GenerateError;

type Source = Box<dyn Error + Send + Sync>;

/// Why a tokenizer could not be read, or text not be encoded, decoded or generated. Errors in a folder name the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file could not be read.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// A file is not the JSON that it should be.
    #[error("{} is not valid", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The error of the parser.
        source: serde_json::Error,
    },
    /// A field has a value of another kind than it should.
    #[error("{} has a {field} that is not valid", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The field.
        field: &'static str,
        /// The error of the parser.
        source: serde_json::Error,
    },
    /// No tokenizer can be built from `tokenizer.json`.
    #[error("{} is no tokenizer", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: Source,
    },
    /// `add_bos_token` is set, but the token that it names is not in the vocabulary.
    #[error("{} asks for add_bos_token, but its bos_token {token:?} is not in the vocabulary", path.display())]
    UnknownBos {
        /// The file.
        path: PathBuf,
        /// `bos_token`.
        token: String,
    },
    /// The tokenizer refused a text.
    #[error("the text cannot be encoded")]
    Encode {
        /// Why.
        source: Source,
    },
    /// The tokenizer refused ids.
    #[error("the ids cannot be decoded")]
    Decode {
        /// Why.
        source: Source,
    },
    /// A token changed text that was already returned, which no decoder should do.
    #[error("the text was {shown:?} when it was shown, and is {found:?} now")]
    Unstable {
        /// The end of the text that was returned.
        shown: String,
        /// The text of the same ids together with the newest ones.
        found: String,
    },
    /// The folder has no chat template.
    #[error("{} has no chat template, neither a chat_template.jinja nor a default one in tokenizer_config.json", dir.display())]
    NoTemplate {
        /// The folder.
        dir: PathBuf,
    },
    /// The chat template cannot be parsed or rendered.
    #[error("the chat template of {} cannot be rendered", dir.display())]
    Template {
        /// The folder.
        dir: PathBuf,
        /// What is wrong, and in which line.
        source: Source,
    },
    /// The chat template refuses the messages.
    #[error("the chat template refuses the messages: {message}")]
    Raised {
        /// The template's message.
        message: String,
    },
    /// A stop string is empty. Every text would contain it.
    #[error("a stop string is empty")]
    EmptyStop,
    /// A stop string contains a special token, which has no text, beside other text.
    #[error(
        "the stop string {stop:?} contains the special token {token:?}, which is never part of the text"
    )]
    SpecialStop {
        /// The stop string.
        stop: String,
        /// The token.
        token: String,
    },
    /// No further id could be generated.
    #[error(transparent)]
    Generate(#[from] GenerateError),
}
