//! Measures whether the scheme of [`exact`](crate::exact) holds on a device and dtype.

mod probe;

use std::fmt;

use burn::tensor::{DType, Device};

/// The shapes of a model that kernels choose their path by.
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
    /// Attention of this shape alone; add linear layers and norms to the public lists.
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

/// One comparison the probe made.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Check {
    /// What was compared.
    pub kind: CheckKind,
    /// The shape it was compared at: `[in, out]` of a linear layer, the width of a norm,
    /// `[heads, kv_heads, head_dim]` of attention.
    pub shape: Vec<usize>,
    /// Rows that shared the call, against all rows in one call.
    pub rows: usize,
    /// Rows compared, at several offsets.
    pub compared: usize,
    /// Rows of which at least one bit differed.
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
    /// Queries of an attention call, over keys fed in one piece.
    Queries,
    /// Queries over keys that were fed in chunks into a larger buffer.
    Chunks,
}

/// What the probe found for one set of shapes on one device and dtype.
///
/// ```
/// use burn::tensor::{DType, Device};
/// use kv_direct::exact::conformance::{Conformance, KernelShapes};
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
}

/// What a probe is about.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Subject {
    /// The shapes of the model.
    pub shapes: KernelShapes,
    /// The device.
    pub device: Device,
    /// The dtype of weights and rows.
    pub dtype: DType,
}

impl Subject {
    /// A model of these shapes on a device, in a dtype.
    #[must_use]
    pub fn new(shapes: &KernelShapes, device: &Device, dtype: DType) -> Self {
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
    /// Runs rows alone, in small calls and at several offsets, and compares every bit with all rows
    /// in one call: each linear layer and norm, one query against many, and keys fed in chunks.
    ///
    /// What works element by element (rotation, activation, soft cap) needs no probe. Of a linear
    /// layer at most 4,096 columns are probed: more are dealt out to threads, not computed otherwise.
    /// (The tests on a real model compare all 49,152 columns of its head.)
    ///
    /// # Cost
    /// One product of 257 rows and as many again in small calls, per linear layer; half a second for
    /// a model of 135 M parameters. The result can be shared between caches of one model.
    #[must_use]
    pub fn probe(shapes: &KernelShapes, device: &Device, dtype: DType) -> Self {
        let checks = probe::run(shapes, device, dtype);
        Self {
            subject: Subject::new(shapes, device, dtype),
            checks,
        }
    }

    /// Whether no bit differed anywhere.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.failures().next().is_none()
    }

    /// Every comparison, in the order made.
    #[must_use]
    pub fn checks(&self) -> &[Check] {
        &self.checks
    }

    /// The comparisons in which a bit differed.
    pub fn failures(&self) -> impl Iterator<Item = &Check> {
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
