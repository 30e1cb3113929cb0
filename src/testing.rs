//! The contract suite: the laws of [`CacheBackend`] as functions that any backend can be put through.
//!
//! A law takes a [`Contract`], which says how a backend is built and what it claims, and a device. It
//! brings its own small random decoders, feeds them, and panics with the law, the model and the step
//! where something does not hold. [`FullKv`](crate::cache::FullKv) is the oracle. No law asks what type
//! a backend is; what differs between backends is declared. [`contract_tests!`](crate::contract_tests)
//! makes a test of every law.
//!
//! What is compared is bits, so the device must keep them for `FullKv`: see
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
    batches::{heads_do_not_depend_on_the_batch, rows_do_not_depend_on_their_neighbours},
    bits::{an_ample_budget_equals_full_kv, bits_repeat},
    contract::{AMPLE, Contract, TIGHT},
    drafts::{a_draft_taken_back_never_was, an_accepted_draft_came_in_one_call},
    keeping::{kept_is_what_the_next_call_reads, the_budget_holds_once_a_step_is_over},
    life::{caches_do_not_touch_each_other, cleared_is_fresh},
    memory::memory_is_what_is_held,
    reading::{rows_are_shown_as_they_came_in, the_newest_rows_are_readable},
    refusals::{a_failed_step_needs_a_clear, a_refused_call_changes_nothing},
    states::{a_parked_cache_goes_on, a_state_goes_on_elsewhere, selected_rows_go_on_as_alone},
    truncation::a_truncation_is_exact_or_refused,
};
#[cfg(doc)]
use crate::cache::CacheBackend;

/// Makes one `#[test]` for every law and backend, in a module for each backend.
///
/// First the device, then for each backend a name and its [`Contract`].
///
/// ```no_run
/// use kv_direct::{burn::tensor::Device, cache::{FullKv, Window}, testing::Contract};
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
                the_newest_rows_are_readable
                rows_are_shown_as_they_came_in
                kept_is_what_the_next_call_reads
                the_budget_holds_once_a_step_is_over
                an_ample_budget_equals_full_kv
                bits_repeat
                cleared_is_fresh
                caches_do_not_touch_each_other
                a_refused_call_changes_nothing
                a_failed_step_needs_a_clear
                memory_is_what_is_held
                rows_do_not_depend_on_their_neighbours
                heads_do_not_depend_on_the_batch
                a_truncation_is_exact_or_refused
                a_draft_taken_back_never_was
                an_accepted_draft_came_in_one_call
                a_state_goes_on_elsewhere
                selected_rows_go_on_as_alone
                a_parked_cache_goes_on
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
