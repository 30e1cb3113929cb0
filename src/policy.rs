//! What is evicted. For authors of policies.
//!
//! A policy decides which entries of a full-attention layer stay between steps. [`Evicting`] makes a complete
//! [`CacheBackend`](crate::cache::CacheBackend) of it: storage, drafts, batches, truncation, memory reports and
//! states come with it.
//!
//! # Writing one
//! Implement [`Policy`]. Only [`NAME`](Policy::NAME), [`options`](Policy::options) and [`evict`](Policy::evict) are
//! required. This policy keeps the newest tokens and every tenth of the others:
//!
//! ```
//! use kv_direct::policy::{Attention, Entries, Policy, Sequence};
//!
//! #[derive(Debug, Clone)]
//! struct EveryTenth {
//!     recent: usize,
//! }
//!
//! impl Policy for EveryTenth {
//!     const NAME: &'static str = "every_tenth";
//!
//!     fn options(&self) -> Vec<(&'static str, String)> {
//!         vec![("recent", self.recent.to_string())]
//!     }
//!
//!     fn evict(&self, entries: &mut Entries<'_>, _: &Attention<'_>, sequence: &Sequence) {
//!         let first_recent = sequence.length.saturating_sub(self.recent);
//!         entries.evict_where(|position| position < first_recent && position % 10 != 0);
//!     }
//! }
//! ```
//!
//! A policy that ranks entries has two sources of scores. [`score_keys`](Policy::score_keys) scores an entry by its
//! key, once, when it is stored: see `examples/knorm.rs`. Attention reports what [`wants`](Policy::wants) asks for,
//! and [`evict`](Policy::evict) turns that into scores: see [`H2o`], [`Tova`] and [`SnapKv`], which are written on
//! this trait.
//!
//! The recipe, down to the test suite, is [`docs/adding-a-backend.md`](crate::_documentation::adding_a_backend).

mod attention;
mod decisions;
mod entries;
mod evicting;
mod full_kv;
mod group;
mod h2o;
mod queries;
mod reindex;
mod saved;
mod select;
mod sequence;
mod snap_kv;
mod streaming_llm;
mod token_budget;
mod tova;
mod window;

use std::fmt;

use burn::tensor::Tensor;

pub use self::{
    attention::Attention,
    entries::Entries,
    evicting::Evicting,
    full_kv::FullKv,
    group::Group,
    h2o::{H2o, H2oConfig},
    sequence::Sequence,
    snap_kv::{Pooling, SnapKv, SnapKvConfig},
    streaming_llm::{Indexing, StreamingLlm, StreamingLlmConfig},
    token_budget::TokenBudget,
    tova::{Tova, TovaConfig},
    window::Window,
};
use crate::cache::Observation;

/// Decides which entries of a full-attention layer are evicted.
///
/// A policy is immutable. What it remembers of a text is stored by [`Evicting`]: a score for every entry, and the
/// queries of an unfinished prompt. So both follow the entries through drafts, truncation, batches and states.
pub trait Policy: fmt::Debug + Clone + Send + 'static {
    /// The name of the backend in a saved state.
    const NAME: &'static str;

    /// Whether the KV heads of a layer may hold different entries. [`evict`](Self::evict) is then called for each.
    const PER_HEAD: bool = false;

    /// Whether the policy ever evicts. If not, a state in which an entry is missing is refused.
    const EVICTS: bool = true;

    /// Everything the policy was built with, by name. A state is refused where one differs, and it may come from a file
    /// that is years old: [`State`](crate::cache::State) says what the texts must be.
    fn options(&self) -> Vec<(&'static str, String)>;

    /// What attention must report of a sequence in the present step. Reports cost memory and a transfer to the host in
    /// every full-attention layer.
    ///
    /// [`evict`](Self::evict) may receive more queries than this: another sequence may ask for more, and an accepted
    /// draft hands over all of its queries. Use the newest you need. Ask for the same kind for every sequence: where
    /// one asks for column sums, all receive them.
    fn wants(&self, sequence: &Sequence) -> Observation {
        let _ = sequence;
        Observation::Nothing
    }

    /// How many of the newest queries of an unfinished prompt are remembered until it ends, of those that
    /// [`LastQueries`](Observation::LastQueries) reported. Their probabilities are then handed to
    /// [`evict`](Self::evict) in front of those of the last step. While they are remembered, nothing is evicted from
    /// their sequence.
    fn remembers(&self) -> usize {
        0
    }

    /// Scores for new entries from their keys, `[1, kv_heads, tokens, head_dim]` to `[1, kv_heads, tokens]`.
    /// `None`, the default, leaves every score at 0. Unless [`PER_HEAD`](Self::PER_HEAD), the score of an entry is the
    /// mean over its KV heads. Scores of another shape fail the step with
    /// [`Shape`](crate::cache::CacheError::Shape).
    fn score_keys(&self, keys: &Tensor<4>) -> Option<Tensor<3>> {
        let _ = keys;
        None
    }

    /// Evicts entries of one sequence at one full-attention layer, and of one KV head with
    /// [`PER_HEAD`](Self::PER_HEAD).
    ///
    /// It is called after attention: as soon as this layer was observed, or when the step is committed if attention had
    /// nothing to report. It is also called for a sequence that the step brings no tokens. The entries of the step are
    /// among `entries`. At least one entry must stay.
    fn evict(&self, entries: &mut Entries<'_>, attention: &Attention<'_>, sequence: &Sequence);

    /// The shortest length, apart from 0, that a truncation of the sequence may reach; `evicted` says whether entries
    /// are missing. By default its present length if so, and 0 if not.
    ///
    /// Return the present length always if `evict` calls [`add_scores`](Entries::add_scores): a truncation does not
    /// undo scores. (The contract suite is then told so by `Contract::without_truncation`.) Scores by
    /// [`score_keys`](Self::score_keys) leave with their entries.
    fn shortest(&self, sequence: &Sequence, evicted: bool) -> usize {
        if evicted { sequence.length } else { 0 }
    }

    /// How many of the first entries, the sinks, are rotated so that they stand directly before the other entries:
    /// forward by the number of evicted ones. See [`StreamingLlm`]. All KV heads must hold the same entries, and all
    /// others must be the newest ones. `None`, the default, rotates nothing.
    fn rotated_sinks(&self) -> Option<usize> {
        None
    }
}
