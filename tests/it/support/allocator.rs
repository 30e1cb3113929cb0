//! Counts what is allocated: by the current thread, and by the whole process.
#![allow(unsafe_code, reason = "an allocator cannot be written without")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    sync::atomic::{AtomicIsize, Ordering::Relaxed},
};

struct Counting;

thread_local! {
    /// Bytes allocated minus bytes freed, by this thread. What another thread frees stays counted.
    static LIVE: Cell<isize> = const { Cell::new(0) };
    /// The most `LIVE` has been.
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// The same of all threads together.
static ALL_LIVE: AtomicIsize = AtomicIsize::new(0);

static ALL_PEAK: AtomicIsize = AtomicIsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `work`. Returns its result, the most bytes this thread held during it beyond what it held before, and
/// how many more it holds afterwards. A vector that grows counts twice while it moves.
pub fn measure<R>(work: impl FnOnce() -> R) -> (R, usize, isize) {
    let before = LIVE.get();
    let outer = PEAK.replace(before);
    let result = work();
    let peak = PEAK.get();
    PEAK.set(outer.max(peak));
    (result, (peak - before).unsigned_abs(), LIVE.get() - before)
}

/// Bytes that the process holds now. Only useful where nothing else runs in it.
pub fn live() -> isize {
    ALL_LIVE.load(Relaxed)
}

/// As [`measure`], for all threads of a process in which nothing else runs.
pub fn measure_all<R>(work: impl FnOnce() -> R) -> (R, usize, isize) {
    let before = live();
    ALL_PEAK.store(before, Relaxed);
    let result = work();
    let peak = ALL_PEAK.load(Relaxed) - before;
    (result, peak.unsigned_abs(), live() - before)
}

pub const MIB: usize = 1 << 20;

/// Whether a measured number of bytes is a reported one, within a tenth and a MiB.
pub const fn near(found: usize, reported: usize) -> bool {
    found.abs_diff(reported) <= reported / 10 + MIB
}

fn count(bytes: isize) {
    let now = ALL_LIVE.fetch_add(bytes, Relaxed) + bytes;
    if bytes > 0 {
        ALL_PEAK.fetch_max(now, Relaxed);
    }
    // A thread that ends may still free when its counters are gone.
    let _ = LIVE.try_with(|live| {
        let now = live.get() + bytes;
        live.set(now);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(now)));
    });
}

// SAFETY: every call is passed on to the system's allocator unchanged, and counting allocates nothing:
// the counters need neither memory nor a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: the caller keeps to the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed());
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size.cast_signed());
        count(-layout.size().cast_signed());
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[test]
fn peak_and_rest_equal_what_was_allocated() {
    let (held, peak, rest) = measure(|| {
        drop(vec![1_u8; 5000]);
        vec![1_u8; 300]
    });
    assert_eq!((held.len(), peak, rest), (300, 5000, 300));
    let (_, outer, _) = measure(|| measure(|| drop(vec![1_u8; 700])));
    assert_eq!(outer, 700, "an inner measurement counts in the outer one");
}
