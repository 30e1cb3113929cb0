//! Measures whether the routines of [`exact`](crate::exact) repeat bits on a device and dtype.

mod probe;

use std::fmt;

use burn::tensor::{DType, Device};

/// The shapes of a model by which kernels choose their path.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelShapes {
    /// `[in, out]` of every different linear layer.
    pub linears: Vec<[usize; 2]>,
    /// Width of every different norm.
    pub norms: Vec<usize>,
    /// Query heads.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl KernelShapes {
    /// The shape of attention alone. Add linear layers and norms to the public lists.
    #[must_use]
    pub const fn new(heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        Self {
            linears: Vec::new(),
            norms: Vec::new(),
            heads,
            kv_heads,
            head_dim,
        }
    }
}

/// One comparison made by a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Check {
    /// What was compared.
    pub kind: CheckKind,
    /// The shape that was compared: `[in, out]` of a linear layer, the width of a norm, `[heads, kv_heads, head_dim]`
    /// of attention, `[layer]` of a decoder.
    pub shape: Vec<usize>,
    /// Rows in each of the small calls. They are compared with one call over all rows.
    pub rows: usize,
    /// Rows compared, at several offsets.
    pub compared: usize,
    /// Rows in which at least one bit differed.
    pub differing: usize,
}

/// What a [`Check`] compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CheckKind {
    /// Rows of a linear layer.
    Linear,
    /// Rows of a norm.
    Norm,
    /// Queries of attention, over keys that were stored at once.
    Queries,
    /// Queries of attention, over keys that were stored in chunks in a larger buffer.
    Chunks,
    /// What enters a layer, and its keys and values, where a text comes in many steps.
    Steps,
    /// Embedded residuals of a [`Replay`](crate::cache::Replay).
    Embedding,
    /// Keys and values of a [`Replay`](crate::cache::Replay).
    Projection,
    /// Residuals that leave a block of a [`Replay`](crate::cache::Replay).
    Block,
}

/// The result of a probe for one set of shapes on one device and dtype.
///
/// ```
/// use burn::tensor::{DType, Device};
/// use kv_direct::exact::{Conformance, KernelShapes};
///
/// let mut shapes = KernelShapes::new(4, 2, 16);
/// shapes.linears.push([640, 96]);
/// let found = Conformance::probe(&shapes, &Device::flex(), DType::F32);
/// assert!(found.is_exact(), "{found}");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conformance {
    subject: Subject,
    checks: Vec<Check>,
    covers_decoder: bool,
}

/// What a probe measures: the shapes of a model on a device, in a dtype.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Subject {
    /// The shapes of the model.
    pub shapes: KernelShapes,
    /// The device.
    pub device: Device,
    /// The dtype of weights and activations.
    pub dtype: DType,
}

impl Subject {
    /// A model of these shapes on a device, in a dtype.
    pub(crate) fn new(shapes: &KernelShapes, device: &Device, dtype: DType) -> Self {
        Self {
            shapes: shapes.clone(),
            device: device.clone(),
            dtype,
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KernelShapes {
            linears,
            norms,
            heads,
            kv_heads,
            head_dim,
        } = &self.shapes;
        write!(
            f,
            "{heads} heads on {kv_heads} of {head_dim}, linear layers {linears:?}, norms {norms:?}, "
        )?;
        write!(f, "{:?} on {:?}", self.dtype, self.device)
    }
}

impl Conformance {
    /// Runs rows alone and in small calls, at several offsets, and compares every bit with one call over all rows. It
    /// covers each linear layer and norm, one query against many, and keys stored in chunks.
    ///
    /// Operations on single elements (rotation, activation, soft cap) need no probe. At most 4,096 columns of a
    /// linear layer are probed: more columns are distributed over threads, but computed in the same way. The tests on
    /// a real model compare all 49,152 columns of its head.
    ///
    /// # Cost
    /// For every linear layer, one product of 515 rows, and several times as many in smaller calls. That
    /// is half a second for a model of 135 M parameters. The caches of one model can share the result.
    ///
    /// # Panics
    /// If `kv_heads` is 0 or does not divide `heads`.
    #[must_use]
    pub fn probe(shapes: &KernelShapes, device: &Device, dtype: DType) -> Self {
        let checks = probe::run(shapes, device, dtype);
        Self {
            subject: Subject::new(shapes, device, dtype),
            checks,
            covers_decoder: false,
        }
    }

    /// The report of comparisons that were made with a decoder.
    pub(crate) const fn of_decoder(
        subject: Subject,
        checks: Vec<Check>,
        covers_decoder: bool,
    ) -> Self {
        Self {
            subject,
            checks,
            covers_decoder,
        }
    }

    /// The same report, for a decoder that computes with the routines of [`exact`](crate::exact) alone.
    #[cfg(feature = "model")]
    pub(crate) fn covering_decoder(mut self) -> Self {
        self.covers_decoder = true;
        self
    }

    /// The report for a device and dtype: without comparisons where the kernels of this crate run, whose bits repeat
    /// by construction, else that of a [`probe`](Self::probe).
    ///
    /// # Panics
    /// As [`probe`](Self::probe).
    ///
    /// ```
    /// use burn::tensor::{DType, Device};
    /// use kv_direct::exact::{Conformance, KernelShapes};
    ///
    /// let found = Conformance::of(&KernelShapes::new(4, 2, 16), &Device::flex(), DType::F32);
    /// assert!(found.is_exact() && found.checks().is_empty());
    /// ```
    #[must_use]
    pub fn of(shapes: &KernelShapes, device: &Device, dtype: DType) -> Self {
        #[cfg(feature = "flex")]
        if super::owned(device, dtype) {
            return Self {
                subject: Subject::new(shapes, device, dtype),
                checks: Vec::new(),
                covers_decoder: false,
            };
        }
        Self::probe(shapes, device, dtype)
    }

    /// Whether no bit differed anywhere.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.failures().next().is_none()
    }

    /// Whether the report is about a decoder, and not only about the routines of [`exact`](crate::exact): it comes from
    /// `Decoder::conformance` or from [`probe_decoder`](Self::probe_decoder).
    #[must_use]
    pub const fn covers_decoder(&self) -> bool {
        self.covers_decoder
    }

    /// Every comparison, in the order in which they were made.
    #[must_use]
    pub fn checks(&self) -> &[Check] {
        &self.checks
    }

    /// The comparisons in which a bit differed.
    fn failures(&self) -> impl Iterator<Item = &Check> {
        self.checks.iter().filter(|check| check.differing > 0)
    }

    /// What was measured.
    #[must_use]
    pub const fn subject(&self) -> &Subject {
        &self.subject
    }
}

impl fmt::Display for Conformance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?}: {} of {} checks failed",
            self.subject.dtype,
            self.failures().count(),
            self.checks.len()
        )?;
        for Check {
            kind,
            shape,
            rows,
            compared,
            differing,
        } in self.failures()
        {
            write!(
                f,
                "; {kind:?} {shape:?} in calls of {rows}: {differing} of {compared} rows differ"
            )?;
        }
        Ok(())
    }
}
