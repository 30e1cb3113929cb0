//! The contract suite: the laws of [`CacheBackend`] as functions that test any backend.
//!
//! A law takes a [`Contract`], which says how a backend is built and what it claims, and a device. The law runs small
//! random decoders on the backend. If something does not hold, it panics with the law, the model and the step.
//! [`FullKv`](crate::FullKv) is the reference. No law checks the type of a backend: what differs between backends is
//! declared. [`contract_tests!`](crate::contract_tests) makes a test of every law.
//!
//! Laws compare bits, so the device must repeat bits for `FullKv`: see
//! [`Conformance`](crate::exact::Conformance).
//!
//! # The laws
//! | law | what holds |
//! |---|---|
//! | `the_newest_entries_are_readable` | the entries of a step are among those returned, once, with their bits |
//! | `entries_are_returned_as_stored` | an entry that is returned again has the bits it was stored with |
//! | `cached_is_what_the_next_step_reads` | `cached` names the positions that the next step reads |
//! | `the_budget_holds_after_each_step` | a full-attention layer holds no more entries than the contract says |
//! | `an_ample_budget_equals_full_kv` | with a budget that no text exceeds, every bit is that of `FullKv` |
//! | `bits_repeat` | the same steps give the same bits; a lossless backend's do not depend on the split |
//! | `a_cleared_cache_is_as_new` | after `clear`, and after truncation to nothing |
//! | `caches_are_independent` | caches on one decoder, forks, and forks of forks |
//! | `a_refused_call_changes_nothing` | and is refused with the error that names it |
//! | `a_failed_step_needs_a_clear` | until then every changing call is `Poisoned` |
//! | `memory_is_what_is_held` | the report covers all that can be seen from outside |
//! | `sequences_do_not_depend_on_each_other` | a sequence of a ragged batch has the bits it has alone |
//! | `heads_do_not_depend_on_the_batch` | with as many sequences as KV heads, too |
//! | `a_truncation_is_exact_or_refused` | the cache continues as without the removed tokens, or refuses unchanged |
//! | `a_discarded_draft_leaves_no_trace` | in any later step |
//! | `an_accepted_draft_equals_one_step` | entries are evicted as if its tokens had come at once |
//! | `a_state_continues_elsewhere` | in a cache of the same kind; any other refuses it |
//! | `selected_sequences_continue_as_alone` | sequences are dropped, reordered and repeated |
//! | `a_parked_cache_continues` | with the bits of one that was never parked |

mod batches;
mod bits;
mod contract;
mod drafts;
mod held;
mod independence;
mod memory;
mod models;
mod reading;
mod recorder;
mod refusals;
mod states;
mod test_run;
mod truncation;

use burn::tensor::Device;

pub use self::contract::Contract;
#[cfg(doc)]
use crate::cache::CacheBackend;

/// Every law with its name, in the order in which a new backend is best tried. A law panics with its name, the model
/// and the step if something does not hold.
#[allow(clippy::type_complexity, reason = "a name and a function")]
pub const LAWS: &[(&str, fn(&Contract, &Device))] = &crate::contract_tests! { @table };

/// Checks one law by its name.
///
/// # Panics
/// If the law is broken, or if there is none of this name.
pub fn check(law: &str, contract: &Contract, device: &Device) {
    let found = LAWS.iter().find(|(name, _)| *name == law);
    let (_, law) = found.unwrap_or_else(|| panic!("there is no law {law}"));
    law(contract, device);
}

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

            $crate::contract_tests! { @list tests ($device, $contract) }
        }
    )+};
    (@table) => {
        $crate::contract_tests! { @list table () }
    };
    (@list $what:tt $given:tt) => {
        $crate::contract_tests! {
            @$what $given
            reading the_newest_entries_are_readable
            reading entries_are_returned_as_stored
            held cached_is_what_the_next_step_reads
            held the_budget_holds_after_each_step
            bits an_ample_budget_equals_full_kv
            bits bits_repeat
            independence a_cleared_cache_is_as_new
            independence caches_are_independent
            refusals a_refused_call_changes_nothing
            refusals a_failed_step_needs_a_clear
            memory memory_is_what_is_held
            batches sequences_do_not_depend_on_each_other
            batches heads_do_not_depend_on_the_batch
            truncation a_truncation_is_exact_or_refused
            drafts a_discarded_draft_leaves_no_trace
            drafts an_accepted_draft_equals_one_step
            states a_state_continues_elsewhere
            states selected_sequences_continue_as_alone
            states a_parked_cache_continues
        }
    };
    (@tests $given:tt $($module:ident $law:ident)+) => {$(
        $crate::contract_tests! { @test $given $law }
    )+};
    (@test ($device:expr, $contract:expr) $law:ident) => {
        #[test]
        fn $law() {
            $crate::testing::check(stringify!($law), &$contract, &$device);
        }
    };
    (@table () $($module:ident $law:ident)+) => {
        [$((stringify!($law), $module::$law as fn(&Contract, &Device))),+]
    };
}
