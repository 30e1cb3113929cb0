//! One object of a configuration: its fields by kind, and why a field is refused. `null` counts as absent.
//!
//! A value is parsed when it is read, so a hostile file costs little more than its size.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

/// An object whose values are not parsed yet.
pub(super) type Object = BTreeMap<String, Box<RawValue>>;

/// Why a configuration is refused.
#[derive(Debug)]
pub(super) enum Refusal {
    /// A field has a value that is not implemented.
    Unsupported { field: String, value: String },
    /// A required field is missing.
    Missing { field: String },
    /// A field has a value of another kind than it should.
    Invalid {
        field: String,
        value: String,
        expected: &'static str,
    },
    /// A field does not fit another one.
    Conflict {
        field: String,
        value: String,
        other: String,
    },
}

/// An object, and the prefix of its fields' names: `text_config.` or nothing.
#[derive(Debug)]
pub(super) struct Fields {
    object: Object,
    within: String,
}

impl Fields {
    pub(super) const fn new(object: Object) -> Self {
        Self {
            object,
            within: String::new(),
        }
    }

    /// The field's full name.
    pub(super) fn name(&self, field: &str) -> String {
        format!("{}{field}", self.within)
    }

    /// The JSON of a field.
    pub(super) fn get(&self, field: &str) -> Option<&str> {
        let json = self.object.get(field)?.get();
        (json != NULL).then_some(json)
    }

    /// Whether the field is `null`. In some classes of transformers that is not the same as absent.
    pub(super) fn is_null(&self, field: &str) -> bool {
        self.object
            .get(field)
            .is_some_and(|json| json.get() == NULL)
    }

    /// Names of all fields that are not `null`.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        let set = self.object.iter().filter(|(_, json)| json.get() != NULL);
        set.map(|(name, _)| name.as_str())
    }

    pub(super) fn size(&self, field: &str) -> Result<Option<usize>, Refusal> {
        self.read(field, "a whole number")
    }

    pub(super) fn number(&self, field: &str) -> Result<Option<f64>, Refusal> {
        self.read(field, "a number")
    }

    pub(super) fn positive(&self, field: &str) -> Result<Option<f64>, Refusal> {
        match self.number(field)? {
            Some(number) if number <= 0.0 => Err(self.invalid(field, "a positive number")),
            number => Ok(number),
        }
    }

    pub(super) fn flag(&self, field: &str) -> Result<Option<bool>, Refusal> {
        self.read(field, "true or false")
    }

    pub(super) fn text(&self, field: &str) -> Result<Option<String>, Refusal> {
        self.read(field, "a text")
    }

    /// The object that is a field of this one.
    pub(super) fn object(&self, field: &str) -> Result<Option<Self>, Refusal> {
        let object: Option<Object> = self.read(field, "an object")?;
        Ok(object.map(|object| Self {
            object,
            within: format!("{}{field}.", self.within),
        }))
    }

    pub(super) fn read<T: DeserializeOwned>(
        &self,
        field: &str,
        expected: &'static str,
    ) -> Result<Option<T>, Refusal> {
        let parsed = self.get(field).map(serde_json::from_str).transpose();
        parsed.map_err(|_| self.invalid(field, expected))
    }

    /// The refusal of `field` for the kind of its value.
    pub(super) fn invalid(&self, field: &str, expected: &'static str) -> Refusal {
        Refusal::Invalid {
            field: self.name(field),
            value: self.shown(field),
            expected,
        }
    }

    /// The refusal of `field` for its value.
    pub(super) fn unsupported(&self, field: &str) -> Refusal {
        Refusal::Unsupported {
            field: self.name(field),
            value: self.shown(field),
        }
    }

    pub(super) fn missing(&self, field: &str) -> Refusal {
        Refusal::Missing {
            field: self.name(field),
        }
    }

    /// The refusal of `field` because it does not fit `other`.
    pub(super) fn conflict(&self, field: &str, other: impl Into<String>) -> Refusal {
        Refusal::Conflict {
            field: self.name(field),
            value: self.shown(field),
            other: other.into(),
        }
    }

    /// A value as it is shown in an error: text without quotes, of limited length.
    pub(super) fn shown(&self, field: &str) -> String {
        let json = self.get(field).unwrap_or(NULL);
        let text = json
            .strip_prefix('"')
            .and_then(|rest| rest.strip_suffix('"'));
        let text = text.unwrap_or(json);
        match text.char_indices().nth(LONGEST) {
            Some((end, _)) => format!("{}…", &text[..end]),
            None => text.into(),
        }
    }
}

const NULL: &str = "null";
const LONGEST: usize = 200;
