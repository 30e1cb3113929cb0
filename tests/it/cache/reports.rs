//! Reports of attention: one of another kind, a second one, a missing one and one that nobody asked for are refused.

use burn::tensor::{Device, Tensor};
use kv_direct::{
    cache::{CacheBackend, CacheError, KeysValues, LayerIndex, Observation, Observed, Span},
    exact::Segment,
    forward_backend,
    model::ForwardError,
    policy::{FullKv, H2o, H2oConfig, SnapKv, SnapKvConfig, Tova, TovaConfig},
};

use crate::support::{
    caches::{PlanKind, residual},
    feed::{feed, refusal},
    models::tiny,
    random::tokens,
};

/// What a faulty decoder does with the reports of its layers.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    None,
    Missing,
    MissingInTheLastLayer,
    OtherKind,
    Twice,
    Unasked,
}

/// Between a decoder and a cache: passes everything on, but reports with a fault.
#[derive(Debug)]
struct Faulty {
    inner: Box<dyn CacheBackend>,
    fault: Fault,
    slots: usize,
}

impl CacheBackend for Faulty {
    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        let read = self.inner.keys_values(layer, span)?;
        self.slots = read.segments(0).iter().map(Segment::slots).sum();
        if self.fault == Fault::Unasked {
            drop(read);
            self.inner.observe(layer, self.sums())?;
            unreachable!("an unasked report was accepted");
        }
        Ok(read)
    }

    fn observe(&mut self, layer: LayerIndex, observed: Observed) -> Result<(), CacheError> {
        match (self.fault, observed) {
            (Fault::Missing, _) => Ok(()),
            (Fault::MissingInTheLastLayer, _) if layer.index() == 2 => Ok(()),
            (Fault::OtherKind, Observed::ColumnSums(_)) => {
                self.inner.observe(layer, self.queries())
            }
            (Fault::OtherKind, _) => self.inner.observe(layer, self.sums()),
            (Fault::Twice, Observed::ColumnSums(sums)) => {
                self.inner
                    .observe(layer, Observed::ColumnSums(sums.clone()))?;
                self.inner.observe(layer, Observed::ColumnSums(sums))
            }
            (Fault::Twice, Observed::LastQueries(queries)) => {
                let first = Observed::LastQueries(queries.clone());
                self.inner.observe(layer, first)?;
                self.inner.observe(layer, Observed::LastQueries(queries))
            }
            (_, observed) => self.inner.observe(layer, observed),
        }
    }

    forward_backend!(self => self.inner; begin wants commit queries lifecycle clear fork);
}

impl Faulty {
    fn sums(&self) -> Observed {
        Observed::ColumnSums(Tensor::zeros([1, 4, self.slots], &Device::flex()))
    }

    fn queries(&self) -> Observed {
        Observed::LastQueries(Tensor::zeros([1, 4, 1, self.slots], &Device::flex()))
    }
}

/// Caches that ask for reports of a prompt of 20 tokens: for sums, for the newest query, for a window of queries.
fn observing() -> Vec<Box<dyn CacheBackend>> {
    let shape = tiny(2).shape();
    vec![
        Box::new(H2o::new(&shape, H2oConfig::new(8, 4)).expect("a budget")),
        Box::new(Tova::new(&shape, TovaConfig::new(8)).expect("a budget")),
        Box::new(SnapKv::new(&shape, SnapKvConfig::new(8, 4)).expect("a budget")),
    ]
}

/// The error of a prompt of 20 tokens, after which only `clear` helps.
fn refused(inner: Box<dyn CacheBackend>, fault: Fault) -> CacheError {
    let decoder = tiny(2);
    let prompt = tokens(1, 20);
    let mut cache = Faulty {
        inner,
        fault,
        slots: 0,
    };
    let ForwardError::Cache(error) = refusal(&decoder, &mut cache, &prompt[..]) else {
        panic!("{fault:?}: not refused by the cache");
    };
    assert_eq!(
        cache.lengths(),
        [0],
        "{fault:?}: a failed step counts nothing"
    );
    cache.fault = Fault::None;
    let next = refusal(&decoder, &mut cache, &prompt[..]);
    assert!(
        matches!(next, ForwardError::Cache(CacheError::Poisoned)),
        "{fault:?}: {next:?}"
    );
    cache.clear();
    feed(&decoder, &mut cache, &prompt[..]);
    assert_eq!(cache.lengths(), [20]);
    error
}

#[test]
fn a_report_of_another_kind_is_refused() {
    for cache in observing() {
        let error = refused(cache, Fault::OtherKind);
        let CacheError::Observation {
            layer,
            expected,
            found,
        } = error
        else {
            panic!("{error:?}");
        };
        assert_eq!(layer, 0);
        assert_ne!(expected, Observation::Nothing);
        assert_ne!(
            std::mem::discriminant(&expected),
            std::mem::discriminant(&found)
        );
    }
}

#[test]
fn a_second_report_is_refused() {
    for cache in observing() {
        let error = refused(cache, Fault::Twice);
        assert!(
            matches!(
                error,
                CacheError::Observation {
                    layer: 0,
                    expected: Observation::Nothing,
                    ..
                }
            ),
            "{error:?}"
        );
    }
}

#[test]
fn a_missing_report_is_refused_by_the_next_layer() {
    for cache in observing() {
        let error = refused(cache, Fault::Missing);
        assert!(
            matches!(error, CacheError::NotObserved { layer: 0, expected } if expected != Observation::Nothing),
            "{error:?}"
        );
    }
}

#[test]
fn a_missing_report_of_the_last_layer_is_refused_by_commit() {
    for cache in observing() {
        let error = refused(cache, Fault::MissingInTheLastLayer);
        assert!(
            matches!(error, CacheError::NotObserved { layer: 2, expected } if expected != Observation::Nothing),
            "{error:?}"
        );
    }
}

#[test]
fn a_report_that_nobody_asked_for_is_refused() {
    let decoder = tiny(2);
    let caches: [Box<dyn CacheBackend>; 2] = [
        Box::new(FullKv::new(&decoder.shape())),
        Box::new(residual(&decoder, 4, PlanKind::Tokens)),
    ];
    for inner in caches {
        let mut cache = Faulty {
            inner,
            fault: Fault::Unasked,
            slots: 0,
        };
        let refused = refusal(&decoder, &mut cache, &tokens(1, 5)[..]);
        assert!(
            matches!(
                refused,
                ForwardError::Cache(CacheError::Observation {
                    layer: 0,
                    expected: Observation::Nothing,
                    found: Observation::ColumnSums,
                })
            ),
            "{refused:?}"
        );
    }
}
