//! Policies of other authors: uneven, greedy, with unusable scores, with changing requests.

use burn::tensor::{Device, Tensor};
use kv_direct::{
    cache::{CacheBackend, CacheError, Draft, LayerIndex, Observation},
    model::ForwardError,
    policy::{Attention, Entries, Evicting, Policy, Sequence},
    testing::Contract,
};

use crate::support::{models::tiny, random::tokens};

fn squared_norms(keys: &Tensor<4>) -> Tensor<3> {
    keys.clone().square().sum_dim(3).squeeze_dim(3)
}

/// Holds another number of entries in every layer and KV head, at most `budget`.
#[derive(Debug, Clone)]
struct Uneven {
    budget: usize,
}

impl Policy for Uneven {
    const NAME: &'static str = "uneven";
    const PER_HEAD: bool = true;

    fn options(&self) -> Vec<(&'static str, String)> {
        vec![("budget", self.budget.to_string())]
    }

    fn score_keys(&self, keys: &Tensor<4>) -> Option<Tensor<3>> {
        Some(squared_norms(keys))
    }

    /// The key of the first token decides how many stay.
    fn evict(&self, entries: &mut Entries<'_>, _: &Attention<'_>, _: &Sequence) {
        let first = entries
            .positions()
            .iter()
            .position(|&position| position == 0);
        let Some(bits) = first
            .and_then(|slot| entries.scores().get(slot))
            .map(|s| s.to_bits())
        else {
            return;
        };
        let count = self.budget - (bits >> 4) as usize % self.budget.div_ceil(2);
        entries.evict_lowest(count, |position| position > 0);
    }
}

kv_direct::contract_tests! {
    on Device::flex();
    uneven => Contract::lossy(|shape, _, budget| Evicting::new(shape, Uneven { budget }));
}

/// One KV head of one layer that lacks an entry is enough.
#[test]
fn a_truncation_looks_at_every_layer_and_head() {
    let decoder = tiny(2);
    let ids = tokens(3, 30);
    let mut refused = 0;
    for budget in 2..24 {
        let mut cache = Evicting::new(&decoder.shape(), Uneven { budget });
        decoder.forward(&ids[..12], &mut cache).expect("a step");
        let held = |layer| cache.cached(LayerIndex::new(layer)).sequence(0).to_vec();
        let complete = |list: &Vec<usize>| list.len() == 12;
        let all = (0..3).all(|layer| held(layer).iter().all(complete));
        let some = (0..3).any(|layer| held(layer).iter().any(complete));
        refused += usize::from(some && !all);
        assert_eq!(cache.truncate(&[9]).is_ok(), all, "budget {budget}");
    }
    assert!(refused > 2, "only {refused} of the caches differ by head");
}

/// Evicts everything that it may, and asks for `wants` from the second step on.
#[derive(Debug, Clone)]
struct Greedy {
    per_query: Observation,
    rotated: usize,
}

impl Policy for Greedy {
    const NAME: &'static str = "greedy";

    fn options(&self) -> Vec<(&'static str, String)> {
        vec![("rotated", self.rotated.to_string())]
    }

    fn wants(&self, sequence: &Sequence) -> Observation {
        match sequence.before {
            0 => Observation::Nothing,
            _ => self.per_query,
        }
    }

    fn evict(&self, entries: &mut Entries<'_>, _: &Attention<'_>, _: &Sequence) {
        entries.evict_where(|_position| true);
    }

    fn rotated_sinks(&self) -> Option<usize> {
        (self.rotated > 0).then_some(self.rotated)
    }
}

#[test]
fn a_policy_that_evicts_everything_reads_its_own_step() {
    let decoder = tiny(2);
    let ids = tokens(4, 20);
    for per_query in [
        Observation::Nothing,
        Observation::ColumnSums,
        Observation::LastQueries(0),
        Observation::LastQueries(usize::MAX),
    ] {
        for rotated in [0, 3, 100] {
            let mut cache = Evicting::new(&decoder.shape(), Greedy { per_query, rotated });
            for step in ids[..12].chunks(5) {
                let logits = decoder.forward(step, &mut cache).expect("a step");
                let logits: Vec<f32> = logits.try_into_vec_as().expect("f32");
                assert!(logits.iter().all(|logit| logit.is_finite()));
            }
            assert!(cache.cached(LayerIndex::new(1)).sequence(0)[0].is_empty());
            cache.begin_draft().expect("no draft is open");
            decoder.forward(&ids[12..15], &mut cache).expect("a step");
            cache.truncate(&[13]).expect("the draft began at 12");
            cache.end_draft(Draft::Accept).expect("a draft");
            assert_eq!(cache.lengths(), [13]);
            let fork = cache.fork();
            assert!(fork.state().is_ok());
            cache.select_sequences(&[0, 0]).expect("they exist");
            assert!(matches!(
                cache.truncate(&[5, 13]),
                Err(CacheError::Irreversible { .. })
            ));
        }
    }
}

/// Scores keys with a number or a shape of its own.
#[derive(Debug, Clone)]
struct Scored {
    by: fn(&Tensor<4>) -> Tensor<3>,
}

impl Policy for Scored {
    const NAME: &'static str = "scored";

    fn options(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    fn score_keys(&self, keys: &Tensor<4>) -> Option<Tensor<3>> {
        Some((self.by)(keys))
    }

    fn evict(&self, entries: &mut Entries<'_>, _: &Attention<'_>, _: &Sequence) {
        entries.evict_lowest(4, |_position| true);
    }
}

#[test]
fn scores_that_are_no_numbers_leave_the_lowest_positions() {
    let decoder = tiny(2);
    let by = |keys: &Tensor<4>| squared_norms(keys).mul_scalar(f32::NAN);
    let mut cache = Evicting::new(&decoder.shape(), Scored { by });
    decoder
        .forward(&tokens(5, 9)[..], &mut cache)
        .expect("a step");
    assert_eq!(
        cache.cached(LayerIndex::new(2)).sequence(0)[0],
        [0, 1, 2, 3]
    );
}

#[test]
fn scores_of_another_shape_fail_the_step() {
    let decoder = tiny(2);
    let by = |keys: &Tensor<4>| squared_norms(keys).sum_dim(2);
    let mut cache = Evicting::new(&decoder.shape(), Scored { by });
    let refused = decoder.forward(&tokens(5, 9)[..], &mut cache);
    let Err(ForwardError::Cache(CacheError::Shape {
        expected, found, ..
    })) = refused
    else {
        panic!("{refused:?}");
    };
    assert_eq!((expected, found), (vec![1, 2, 9], vec![1, 2, 1]));
    cache.clear();
    let alone = decoder.forward(&tokens(5, 1)[..], &mut cache);
    assert!(alone.is_ok(), "one token has scores of the right shape");
}
