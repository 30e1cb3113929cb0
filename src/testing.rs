//! The contract suite: the laws of [`CacheBackend`] as functions that test any backend.
//!
//! A law takes a [`Contract`], which says how a backend is built and what it claims, and a device. The law runs small
//! random decoders on the backend. If something does not hold, it panics with the law, the model and the step.
//! [`FullKv`](crate::FullKv) is the reference. No law checks the type of a backend: what differs between backends is
//! declared. [`contract_tests!`](crate::contract_tests) makes a test of every law.
//!
//! Laws compare bits, so the device must repeat bits for `FullKv`: see
//! [`Conformance`](crate::exact::conformance::Conformance).

mod batches;
mod bits;
mod contract;
mod drafts;
mod keeping;
mod life;
mod memory;
mod models;
mod reading;
mod recorder;
mod refusals;
mod states;
mod test_run;
mod truncation;

pub use self::{
    batches::{heads_do_not_depend_on_the_batch, sequences_do_not_depend_on_each_other},
    bits::{an_ample_budget_equals_full_kv, bits_repeat},
    contract::{AMPLE, Contract, TIGHT},
    drafts::{a_discarded_draft_leaves_no_trace, an_accepted_draft_equals_one_step},
    keeping::{cached_is_what_the_next_step_reads, the_budget_holds_after_each_step},
    life::{a_cleared_cache_is_as_new, caches_are_independent},
    memory::memory_is_what_is_held,
    reading::{entries_are_returned_as_stored, the_newest_entries_are_readable},
    refusals::{a_failed_step_needs_a_clear, a_refused_call_changes_nothing},
    states::{
        a_parked_cache_continues, a_state_continues_elsewhere, selected_sequences_continue_as_alone,
    },
    truncation::a_truncation_is_exact_or_refused,
};
#[cfg(doc)]
use crate::cache::CacheBackend;

/// Makes one `#[test]` for every law and backend, in one module for each backend.
///
/// The device comes first, then a name and a [`Contract`] for each backend.
///
/// ```no_run
/// use kv_direct::{FullKv, Window, burn::tensor::Device, testing::Contract};
///
/// kv_direct::contract_tests! {
///     on Device::flex();
///     full_kv => Contract::lossless(|shape, _device, _budget| FullKv::new(shape));
///     window => Contract::lossy(|shape, _device, budget| Window::new(shape, budget).unwrap());
/// }
/// # fn main() {}
/// ```
#[macro_export]
macro_rules! contract_tests {
    (on $device:expr; $($name:ident => $contract:expr;)+) => {$(
        mod $name {
            #[allow(unused_imports, reason = "the contract may need nothing")]
            use super::*;

            $crate::contract_tests! {
                @laws ($device, $contract)
                the_newest_entries_are_readable
                entries_are_returned_as_stored
                cached_is_what_the_next_step_reads
                the_budget_holds_after_each_step
                an_ample_budget_equals_full_kv
                bits_repeat
                a_cleared_cache_is_as_new
                caches_are_independent
                a_refused_call_changes_nothing
                a_failed_step_needs_a_clear
                memory_is_what_is_held
                sequences_do_not_depend_on_each_other
                heads_do_not_depend_on_the_batch
                a_truncation_is_exact_or_refused
                a_discarded_draft_leaves_no_trace
                an_accepted_draft_equals_one_step
                a_state_continues_elsewhere
                selected_sequences_continue_as_alone
                a_parked_cache_continues
            }
        }
    )+};
    (@laws $given:tt $($law:ident)+) => {$(
        $crate::contract_tests! { @law $given $law }
    )+};
    (@law ($device:expr, $contract:expr) $law:ident) => {
        #[test]
        fn $law() {
            $crate::testing::$law(&$contract, &$device);
        }
    };
}
