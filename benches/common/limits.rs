//! What this machine can do at most: how fast it reads memory, how fast it multiplies. Measured, not taken
//! from a data sheet, and meant to be measured between samples: a shared machine's rates drift.

use std::{
    hint::black_box,
    thread,
    time::{Duration, Instant},
};

use burn::tensor::{Device, Tensor};

use super::interleaved::median;

/// Both rates, measured again and again between samples.
pub(crate) struct Limits {
    memory: Memory,
    square: Square,
    reads: Vec<Duration>,
    products: Vec<Duration>,
}

impl Limits {
    pub(crate) fn new() -> Self {
        Self {
            memory: Memory::new(),
            square: Square::new(),
            reads: Vec::new(),
            products: Vec::new(),
        }
    }

    /// Measures both once.
    pub(crate) fn measure(&mut self) {
        self.reads.push(self.memory.read());
        self.products.push(self.square.multiply());
    }

    /// Starts again: the next rates are those of the next samples.
    pub(crate) fn forget(&mut self) {
        self.reads.clear();
        self.products.clear();
    }

    /// The read rate: bytes a second.
    pub(crate) fn read_rate(&self) -> f64 {
        Memory::BYTES as f64 / median(&self.reads)
    }

    /// The matrix rate: floating-point operations a second.
    pub(crate) fn matrix_rate(&self) -> f64 {
        Square::OPERATIONS as f64 / median(&self.products)
    }
}

/// Pairs of streams that a thread reads in turn: one stream does not use the whole bandwidth.
const PAIRS: usize = 4;
/// Numbers read of a stream before the next has its turn: 1 KiB.
const RUN: usize = 128;

/// A buffer whose halves hold the same numbers: all hardware threads compare them, several streams a
/// thread. Comparing slices is the loop that safe code has in vector instructions of the processor at
/// hand.
pub(crate) struct Memory(Vec<u64>);

impl Memory {
    /// Bytes that [`read`](Self::read) goes through: 512 MiB.
    pub(crate) const BYTES: usize = 512 << 20;

    pub(crate) fn new() -> Self {
        let memory = Self(vec![1; Self::BYTES / size_of::<u64>()]);
        memory.read();
        memory
    }

    /// The time of reading all of it.
    pub(crate) fn read(&self) -> Duration {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let (left, right) = self.0.split_at(self.0.len() / 2);
        let share = left.len().div_ceil(threads);
        let start = Instant::now();
        thread::scope(|scope| {
            for (left, right) in left.chunks(share).zip(right.chunks(share)) {
                scope.spawn(move || assert!(same(left, right), "nobody writes here"));
            }
        });
        start.elapsed()
    }
}

/// Whether two equally long slices are equal, compared at [`PAIRS`] places in turn.
fn same(left: &[u64], right: &[u64]) -> bool {
    let part = left.len().div_ceil(PAIRS);
    let pairs: Vec<_> = left.chunks(part).zip(right.chunks(part)).collect();
    (0..part).step_by(RUN).all(|from| {
        pairs.iter().all(|(left, right)| {
            let range = from.min(left.len())..(from + RUN).min(left.len());
            left[range.clone()] == right[range]
        })
    })
}

/// A square matrix large enough that its product with itself is all arithmetic, burn's own on all threads.
pub(crate) struct Square(Tensor<2>);

impl Square {
    const SIDE: usize = 1024;
    /// Floating-point operations of [`multiply`](Self::multiply).
    pub(crate) const OPERATIONS: usize = 2 * Self::SIDE.pow(3);

    pub(crate) fn new() -> Self {
        let square = Self(Tensor::full([Self::SIDE, Self::SIDE], 0.5, &Device::flex()));
        square.multiply();
        square
    }

    /// The time of one product.
    pub(crate) fn multiply(&self) -> Duration {
        let start = Instant::now();
        black_box(self.0.clone().matmul(self.0.clone()));
        start.elapsed()
    }
}
