//! Chat templates: rendered as transformers renders them, within limits.
//!
//! A template comes with a model folder and is not trusted. It is rendered on a thread of its own, with a stack that
//! suffices for every source within the limits of [`source`], and with fuel for steps and bytes.
//!
//! A filter or string method of Python that is missing here causes an error, never a different text.

mod date;
mod environment;
mod json;
mod literal;
mod python;
mod source;

use std::{
    error::Error,
    panic,
    path::{Path, PathBuf},
    thread,
};

use minijinja::{Value, context, value::merge_maps};

use self::{
    environment::{Raised, environment},
    source::prepared,
};
use super::{Message, TextError};

/// A size of a template that is beyond its limit.
#[derive(Debug, thiserror::Error)]
#[error("{found} {what}, at most {most} are accepted")]
struct Limit {
    what: &'static str,
    found: usize,
    most: usize,
}

impl Limit {
    const fn check(what: &'static str, found: usize, most: usize) -> Result<(), Self> {
        match found <= most {
            true => Ok(()),
            false => Err(Self { what, found, most }),
        }
    }
}

/// Bytes of the stack of a rendering.
const STACK: usize = 64 << 20;
/// Steps of a rendering, each of them an instruction or 64 bytes.
const FUEL: u64 = 2_000_000;
/// Further steps for every byte of the messages.
const FUEL_OF_A_BYTE: u64 = 4;

/// A template that may be missing, and the variables that are always defined.
#[derive(Debug)]
pub(super) struct Template {
    dir: PathBuf,
    source: Option<String>,
    tokens: Value,
}

impl Template {
    pub(super) fn new(
        dir: &Path,
        source: Option<String>,
        tokens: Vec<(&'static str, String)>,
    ) -> Self {
        Self {
            dir: dir.into(),
            source,
            tokens: Value::from_pairs(tokens),
        }
    }

    /// Renders messages with variables of the caller's own.
    pub(super) fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        variables: Value,
    ) -> Result<String, TextError> {
        let no_template = || TextError::NoTemplate {
            dir: self.dir.clone(),
        };
        let source = self.source.as_ref().ok_or_else(no_template)?;
        let bytes: usize = messages.iter().map(|message| message.content.len()).sum();
        let values: Vec<Value> = messages.iter().map(Message::value).collect();
        // The last map that has a name counts.
        let nothing = context! { tools => (), documents => () };
        let variables = context! {
            messages => values,
            add_generation_prompt,
            ..merge_maps([self.tokens.clone(), nothing, variables])
        };
        let fuel = FUEL + FUEL_OF_A_BYTE * bytes as u64;
        let rendered = on_a_thread(|| {
            let source = prepared(source)?;
            let env = environment(fuel)?;
            let text = env.render_str(&source, variables);
            text.map_err(|error| error.into())
        });
        rendered.map_err(|source| self.error(source))
    }

    fn error(&self, source: Box<dyn Error + Send + Sync>) -> TextError {
        let mut cause: Option<&(dyn Error + 'static)> = Some(&*source);
        while let Some(error) = cause {
            if let Some(Raised(message)) = error.downcast_ref() {
                let message = message.clone();
                return TextError::Raised { message };
            }
            cause = error.source();
        }
        let dir = self.dir.clone();
        TextError::Template { dir, source }
    }
}

type Rendered = Result<String, Box<dyn Error + Send + Sync>>;

/// Runs `work` on a thread with a large stack. A panic of the engine is an error.
fn on_a_thread(work: impl FnOnce() -> Rendered + Send) -> Rendered {
    thread::scope(|scope| {
        let builder = thread::Builder::new().stack_size(STACK);
        let thread = builder.spawn_scoped(scope, || {
            panic::catch_unwind(panic::AssertUnwindSafe(work))
                .unwrap_or_else(|_| Err("the template engine panicked".into()))
        })?;
        let panicked = |_| Err("the template engine panicked".into());
        thread.join().unwrap_or_else(panicked)
    })
}
