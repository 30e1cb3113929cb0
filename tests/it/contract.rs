//! The contract suite over every backend.

use std::sync::{Mutex, PoisonError};

use burn::tensor::{Device, Int, Tensor, TensorData};
use kv_direct::{
    cache::{CacheBackend, CacheError, Draft, KeysValues, LayerIndex, ModelShape, Observed, Span},
    exact::{Conformance, Segment},
    forward_backend,
    policy::{
        FullKv, H2o, H2oConfig, Indexing, SnapKv, SnapKvConfig, StreamingLlm, StreamingLlmConfig,
        Tova, TovaConfig, Window,
    },
    positions::Positions,
    residual::{Plan, ResidualCheckpoint, ResidualConfig, Retain},
    testing::{Contract, check},
};

use crate::support::caches::PlanKind;

/// A probe for each shape of the suite's models, made once.
fn probe(shape: &ModelShape, device: &Device) -> Conformance {
    static MADE: Mutex<Vec<(ModelShape, Conformance)>> = Mutex::new(Vec::new());
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, probe)) = made.iter().find(|(of, _)| of == shape) {
        return probe.clone();
    }
    let probe = Conformance::probe(&shape.kernels, device, shape.dtype);
    made.push((shape.clone(), probe.clone()));
    probe
}

/// A plan with `less` hot tokens fewer than the budget.
fn residual(plan_kind: PlanKind, less: usize) -> Contract {
    let contract = Contract::lossless(move |shape, device, budget| {
        let plan = plan_kind.plan(shape).with_hot(budget - less);
        // The suite's decoder computes with `exact` alone.
        let config = ResidualConfig::new(plan).even_if_larger();
        let config = config.with_certified_eviction(false);
        ResidualCheckpoint::new(shape, &probe(shape, device), config).expect("the probe passed")
    });
    contract
        .with_most_entries(move |budget, _, _| budget - less)
        .with_rebuilt_entries()
        .with_parking()
}

/// Keys and values of the first full-attention layer are stored, those of the others rebuilt from ids.
fn first_stored() -> Contract {
    let contract = Contract::lossless(|shape, device, budget| {
        let mut plan = vec![Retain::Nothing; shape.layers()];
        let first = shape.windows.iter().position(Option::is_none);
        plan[first.expect("a full-attention layer")] = Retain::KeysValues;
        let plan = Plan::new(shape, plan).expect("a plan for these layers");
        let config = ResidualConfig::new(plan.with_hot(budget)).with_certified_eviction(false);
        ResidualCheckpoint::new(shape, &probe(shape, device), config).expect("the probe passed")
    });
    contract.with_rebuilt_entries().with_every_truncation()
}

fn streaming(indexing: Indexing) -> Contract {
    Contract::lossy(move |shape, _, budget| {
        let config = StreamingLlmConfig::new(budget - 3).with_sinks(3);
        StreamingLlm::new(shape, config.with_indexing(indexing)).expect("recent tokens")
    })
}

fn tova(protect: bool) -> Contract {
    Contract::lossy(move |shape, _, budget| {
        let config = TovaConfig::new(budget).with_protected_last(protect);
        Tova::new(shape, config).expect("a budget")
    })
}

fn h2o(sinks: usize) -> Contract {
    let contract = Contract::lossy(move |shape, _, budget| {
        let config = H2oConfig::new(budget, budget / 2).with_sinks(sinks);
        H2o::new(shape, config).expect("half of it")
    });
    contract.without_truncation()
}

fn snap_kv() -> Contract {
    let contract = Contract::lossy(|shape, _, budget| {
        SnapKv::new(shape, SnapKvConfig::new(budget, 4)).expect("a budget above the window")
    });
    contract.with_most_entries(|budget, prompt, length| match prompt {
        Some(prompt) => prompt.min(budget) + length - prompt,
        None => length,
    })
}

kv_direct::contract_tests! {
    on Device::flex();
    full_kv => Contract::lossless(|shape, _, _| FullKv::new(shape));
    residual_checkpoint => residual(PlanKind::Tokens, 0).with_every_truncation();
    residual_checkpoint_without_hot_tokens => residual(PlanKind::Tokens, 8).with_every_truncation();
    residual_checkpoint_of_residuals => residual(PlanKind::Residuals, 0).with_every_truncation();
    residual_checkpoint_with_a_stored_layer => first_stored().with_parking();
    window => Contract::lossy(|shape, _, budget| Window::new(shape, budget).expect("a budget"));
    h2o => h2o(2);
    streaming_llm => streaming(Indexing::Original);
    streaming_llm_re_indexed => streaming(Indexing::CacheIndex).with_rotated_keys().without_sliding_windows();
    snap_kv => snap_kv();
    drafts_without_states => stateless();
    tova => tova(false);
    tova_with_the_newest_entry_protected => tova(true);
    boxed => Contract::lossy(|shape, _, budget| -> Box<dyn CacheBackend> {
        Box::new(Window::new(shape, budget).expect("a budget"))
    });
}

/// Returns the entries of sliding windows in consecutive slots, wherever they were.
#[derive(Debug, Clone)]
struct Compacting {
    inner: FullKv,
    shape: ModelShape,
}

impl CacheBackend for Compacting {
    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        let all = self.inner.keys_values(layer, span)?;
        if self.shape.windows[layer.index()].is_none() {
            return Ok(all);
        }
        let packed = |segment: &Segment| {
            let slots = segment.positions(0).iter().enumerate();
            let used = slots.filter(|&(_, &position)| position != Positions::EMPTY);
            let (slots, positions): (Vec<i64>, Vec<usize>) = used
                .map(|(slot, &position)| (slot as i64, position))
                .unzip();
            let data = TensorData::new(slots.clone(), [slots.len()]);
            let at = Tensor::<1, Int>::from_data(data, &segment.values().device());
            let [keys, values] = [segment.key_rows(), segment.values().clone()];
            let [keys, values] = [keys, values].map(|rows| rows.select(1, at.clone()));
            Segment::from_rows(keys, values, vec![positions], 0)
        };
        let sequences = all.sequences().iter();
        KeysValues::new(
            sequences
                .map(|all| all.iter().map(packed).collect())
                .collect(),
        )
    }

    forward_backend!(self => self.inner; begin wants observe commit queries lifecycle clear);

    fn fork(&self) -> Box<dyn CacheBackend> {
        Box::new(self.clone())
    }
}

/// Sums run over slots: entries that were moved to others give other bits.
#[test]
#[should_panic(expected = "an ample budget equals FullKv: the model with sliding windows of 40")]
fn entries_that_are_moved_break_a_law() {
    let contract = Contract::lossless(|shape, _, _| {
        let (inner, shape) = (FullKv::new(shape), shape.clone());
        Compacting { inner, shape }
    });
    check("an_ample_budget_equals_full_kv", &contract, &Device::flex());
}

/// Takes every report of attention.
#[derive(Debug, Clone)]
struct Unchecked(FullKv);

impl CacheBackend for Unchecked {
    fn observe(&mut self, _: LayerIndex, _: Observed) -> Result<(), CacheError> {
        Ok(())
    }

    forward_backend!(self => self.0; begin keys_values wants commit queries lifecycle clear);

    fn fork(&self) -> Box<dyn CacheBackend> {
        Box::new(self.clone())
    }
}

#[test]
#[should_panic(expected = "an invalid step was accepted")]
fn a_report_that_nobody_asked_for_must_be_refused() {
    let contract = Contract::lossless(|shape, _, _| Unchecked(FullKv::new(shape)));
    check("a_failed_step_needs_a_clear", &contract, &Device::flex());
}

/// Drafts are there, states are not.
#[derive(Debug, Clone)]
struct Stateless(FullKv);

impl CacheBackend for Stateless {
    fn begin_draft(&mut self) -> Result<(), CacheError> {
        self.0.begin_draft()
    }

    fn end_draft(&mut self, draft: Draft) -> Result<(), CacheError> {
        self.0.end_draft(draft)
    }

    forward_backend!(self => self.0; begin keys_values wants observe commit queries truncate clear);

    fn fork(&self) -> Box<dyn CacheBackend> {
        Box::new(self.clone())
    }
}

fn stateless() -> Contract {
    let contract = Contract::lossless(|shape, _, _| Stateless(FullKv::new(shape)));
    contract.without_states().without_selection()
}
