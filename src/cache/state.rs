//! The content of a cache as named values, to be continued elsewhere.

use std::{collections::BTreeMap, fmt};

use burn::tensor::{DType, Tensor};

use crate::{
    cache::{CacheError, ModelShape},
    fields::{Fields, difference},
};

/// The content of a cache as named values, and what kind of cache it was taken from: the backend, its options
/// and the model.
///
/// The `session` module (feature `session`) writes a state to a file and reads it back. It lists the values of every
/// backend of this crate.
///
/// Options and the sizes of the model are fields: a name and a text. They are compared with those of files that may be
/// years old, so a text never changes. Write numbers in decimal, and words of your own choice for everything else:
/// neither the name of a variant nor a sentence. Leave out an option that a later version adds while it has the value
/// that it always had.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::cache::{CacheBackend, StateValue, ModelShape, State};
/// use kv_direct::{FullKv, exact::KernelShapes};
///
/// let shape = ModelShape::new(2, 64, DType::F32, KernelShapes::new(4, 2, 16));
/// let state = FullKv::new(&shape).state()?;
/// assert_eq!((state.backend(), state.values().count()), ("full_kv", 2));
///
/// // A backend of your own:
/// let mut state = State::new("newest", [("budget".into(), "5".into())], &shape);
/// assert!(state.model().any(|field| field == ("kv_heads", "2")));
/// state.insert("lengths", StateValue::Integers(vec![3, 7]));
/// assert_eq!(state.integers("lengths")?, [3, 7]);
/// assert!(state.floats("scores").is_err());
/// # Ok::<(), kv_direct::cache::CacheError>(())
/// ```
#[derive(Clone)]
pub struct State {
    backend: String,
    options: Fields,
    model: Fields,
    pub(super) values: BTreeMap<String, StateValue>,
}

/// One value of a [`State`].
#[derive(Debug, Clone)]
#[non_exhaustive]
#[allow(clippy::large_enum_variant, reason = "most values are tensors")]
pub enum StateValue {
    /// Keys, values or residuals, in the dtype of the model.
    Tensor(Tensor<3>),
    /// Positions, lengths, counters.
    Integers(Vec<u64>),
    /// Token ids.
    Ids(Vec<u32>),
    /// Scores.
    Floats(Vec<f32>),
}

impl State {
    /// A state without values, of the backend with this name and these options, for a model of this shape.
    #[must_use]
    pub fn new(
        backend: &str,
        options: impl IntoIterator<Item = (String, String)>,
        shape: &ModelShape,
    ) -> Self {
        let options = options.into_iter().collect();
        Self::of(backend.into(), options, shape.fields())
    }

    pub(crate) const fn of(backend: String, options: Fields, model: Fields) -> Self {
        Self {
            backend,
            options,
            model,
            values: BTreeMap::new(),
        }
    }

    /// The name of the backend.
    #[must_use]
    pub fn backend(&self) -> &str {
        &self.backend
    }

    /// The backend's options, by name.
    pub fn options(&self) -> impl Iterator<Item = (&str, &str)> {
        let options = self.options.iter();
        options.map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// The sizes of the model, by name.
    pub fn model(&self) -> impl Iterator<Item = (&str, &str)> {
        let model = self.model.iter();
        model.map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// Checks that this state was taken from a cache of the same kind as `own`.
    ///
    /// # Errors
    /// [`Foreign`](CacheError::Foreign), naming what differs.
    pub fn check(&self, own: &Self) -> Result<(), CacheError> {
        let foreign = |what: String, expected: &str, found: &str| {
            Err(CacheError::Foreign {
                what,
                expected: expected.into(),
                found: found.into(),
            })
        };
        if self.backend != own.backend {
            return foreign("the backend".into(), &own.backend, &self.backend);
        }
        let kinds = [
            ("the model's", &own.model, &self.model),
            ("the option", &own.options, &self.options),
        ];
        for (what, own, fields) in kinds {
            if let Some((name, expected, found)) = difference(own, fields) {
                let [expected, found] = [expected, found].map(|value| value.unwrap_or("none"));
                return foreign(format!("{what} {name}"), expected, found);
            }
        }
        Ok(())
    }

    /// Adds a value, or replaces it.
    pub fn insert(&mut self, name: impl Into<String>, value: StateValue) {
        self.values.insert(name.into(), value);
    }

    /// All values, with their names.
    pub fn values(&self) -> impl Iterator<Item = (&str, &StateValue)> {
        self.values
            .iter()
            .map(|(name, value)| (name.as_str(), value))
    }

    /// Whether there is a value of this name.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    /// Integers by name.
    ///
    /// # Errors
    /// [`State`](CacheError::State) if there is no such value, or one of another kind.
    pub fn integers(&self, name: &str) -> Result<&[u64], CacheError> {
        match self.value(name)? {
            StateValue::Integers(values) => Ok(values),
            _ => Err(wrong(name, "it holds no integers")),
        }
    }

    /// Token ids by name.
    ///
    /// # Errors
    /// As [`integers`](Self::integers).
    pub fn ids(&self, name: &str) -> Result<&[u32], CacheError> {
        match self.value(name)? {
            StateValue::Ids(values) => Ok(values),
            _ => Err(wrong(name, "it holds no token ids")),
        }
    }

    /// Scores by name.
    ///
    /// # Errors
    /// As [`integers`](Self::integers).
    pub fn floats(&self, name: &str) -> Result<&[f32], CacheError> {
        match self.value(name)? {
            StateValue::Floats(values) => Ok(values),
            _ => Err(wrong(name, "it holds no scores")),
        }
    }

    /// A tensor by name, with these dimensions and this dtype.
    ///
    /// # Errors
    /// [`State`](CacheError::State), [`Shape`](CacheError::Shape), [`Dtype`](CacheError::Dtype).
    pub fn tensor(
        &self,
        name: &str,
        dims: [usize; 3],
        dtype: DType,
    ) -> Result<Tensor<3>, CacheError> {
        let StateValue::Tensor(tensor) = self.value(name)? else {
            return Err(wrong(name, "it is no tensor"));
        };
        if tensor.dims() != dims {
            return Err(CacheError::Shape {
                what: "the tensors of the state",
                expected: dims.to_vec(),
                found: tensor.dims().to_vec(),
            });
        }
        if tensor.dtype() != dtype {
            return Err(CacheError::Dtype {
                what: "the tensors of the state",
                expected: dtype,
                found: tensor.dtype(),
            });
        }
        Ok(tensor.clone())
    }

    /// Lengths, positions or counters by name, each [`usize::MAX`] where [`u64::MAX`] stands for none.
    pub(crate) fn positions(&self, name: &str) -> Result<Vec<usize>, CacheError> {
        let read = |&value: &u64| match value {
            u64::MAX => Ok(usize::MAX),
            value => usize::try_from(value).map_err(|_| wrong(name, "a position is too large")),
        };
        self.integers(name)?.iter().map(read).collect()
    }

    /// Processed tokens of every sequence.
    pub(crate) fn lengths(&self) -> Result<Vec<usize>, CacheError> {
        let lengths = self.positions("lengths")?;
        if lengths.iter().any(|&length| length > u32::MAX as usize) {
            return Err(wrong("lengths", "a sequence is too long"));
        }
        Ok(lengths)
    }

    pub(crate) fn insert_positions(&mut self, name: &str, of: impl IntoIterator<Item = usize>) {
        let write = |value| match value {
            usize::MAX => u64::MAX,
            value => value as u64,
        };
        self.insert(
            name,
            StateValue::Integers(of.into_iter().map(write).collect()),
        );
    }

    fn value(&self, name: &str) -> Result<&StateValue, CacheError> {
        self.values
            .get(name)
            .ok_or_else(|| wrong(name, "it is missing"))
    }
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State")
            .field("backend", &self.backend)
            .field("options", &self.options)
            .field("values", &self.values.len())
            .finish_non_exhaustive()
    }
}

/// A value that is missing or does not fit.
pub(crate) fn wrong(name: &str, problem: &'static str) -> CacheError {
    CacheError::State {
        value: name.into(),
        problem,
    }
}
