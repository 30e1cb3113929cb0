//! The messages of a conversation.

use minijinja::{Value, value::Serde};
use serde::Serialize;

/// One message of a conversation.
///
/// ```
/// use kv_direct::text::Message;
///
/// let message = Message::new("user", "Why is the sky blue?");
/// assert_eq!(message.role, "user");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Message {
    /// The author: `system`, `user`, `assistant`, or another role of the template.
    pub role: String,
    /// The text.
    pub content: String,
    /// Further fields, in the order in which they were added.
    fields: Vec<(String, Value)>,
}

impl Message {
    /// A message of `role`.
    #[must_use]
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
            fields: Vec::new(),
        }
    }

    /// With a further field that the template reads, such as `tool_calls` or `name`: any value that can be JSON. A field
    /// `role` or `content` takes the place of the text.
    ///
    /// ```
    /// use std::collections::BTreeMap;
    ///
    /// use kv_direct::text::Message;
    ///
    /// let function = BTreeMap::from([("name", "weather")]);
    /// let message = Message::new("assistant", "").with("tool_calls", &[function]);
    /// ```
    #[must_use]
    pub fn with(mut self, field: impl Into<String>, value: &(impl Serialize + ?Sized)) -> Self {
        self.fields.push((field.into(), Value::from(Serde(value))));
        self
    }

    /// The message as a template sees it.
    pub(super) fn value(&self) -> Value {
        let own = [
            ("role".to_owned(), Value::from(&*self.role)),
            ("content".to_owned(), Value::from(&*self.content)),
        ];
        let fields = own.into_iter().chain(self.fields.iter().cloned());
        Value::from_pairs(fields)
    }
}
