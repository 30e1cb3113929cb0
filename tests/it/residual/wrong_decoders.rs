//! A decoder that rebuilds tensors of another shape or dtype is refused by name.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use kv_direct::{
    ResidualCheckpoint, StreamingLlm,
    cache::{
        CacheBackend, CacheError, KeysValues, LayerIndex, ModelShape, Projection, Replay, Span,
        Step, TokenIds,
    },
    exact::{Conformance, KernelShapes},
    policy::StreamingLlmConfig,
    positions::Positions,
    residual::{Plan, ResidualConfig},
};

const LAYERS: usize = 2;

/// What a decoder does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    None,
    Shape(&'static str),
    Dtype(&'static str),
}

struct Toy(Mistake);

impl Toy {
    /// The tensor, spoilt if this is where the mistake is.
    fn spoilt<const D: usize>(&self, what: &'static str, x: Tensor<D>) -> Tensor<D> {
        match self.0 {
            Mistake::Shape(at) if at == what => {
                let half = x.dims()[D - 1] / 2;
                x.slice_dim(D - 1, 0..half)
            }
            Mistake::Dtype(at) if at == what => x.cast(FloatDType::F64),
            _ => x,
        }
    }

    fn entries(residual: Tensor<3>) -> Tensor<4> {
        let [_, tokens, _] = residual.dims();
        residual.reshape([1, tokens, 4, 16]).swap_dims(1, 2)
    }
}

impl Replay for Toy {
    fn embed(&self, tokens: &TokenIds, _: &Positions) -> Result<Tensor<3>, CacheError> {
        let count = tokens.lengths().iter().sum();
        let embedded = Tensor::ones([1, count, 64], &Device::flex());
        Ok(self.spoilt("embedded residuals", embedded))
    }

    fn project(&self, residual: Tensor<3>, _: &Positions) -> Result<Projection, CacheError> {
        let entries = Self::entries(residual);
        Ok(Projection {
            keys: self.spoilt("rebuilt keys", entries.clone()),
            values: self.spoilt("rebuilt values", entries),
        })
    }

    fn forward(
        &self,
        residual: Tensor<3>,
        _: &Positions,
        _: &KeysValues,
    ) -> Result<Tensor<3>, CacheError> {
        Ok(self.spoilt("replayed residuals", residual))
    }

    fn rotate(
        &self,
        keys: Tensor<4>,
        _: &Positions,
        _: &Positions,
    ) -> Result<Tensor<4>, CacheError> {
        Ok(self.spoilt("rotated keys", keys))
    }
}

/// Makes an empty cache.
type Make<'a> = &'a dyn Fn() -> Box<dyn CacheBackend>;

/// Three steps of three tokens.
fn fed(cache: &mut dyn CacheBackend, toy: &Toy) -> Result<(), CacheError> {
    for start in [0, 3, 6] {
        let step = Step::new(TokenIds::from(&[1, 2, 3][..]), &[start])?;
        cache.begin(&step)?;
        for layer in 0..LAYERS {
            let residual = Tensor::<3>::ones([1, 3, 64], &Device::flex());
            let projection = Projection {
                keys: Toy::entries(residual.clone()),
                values: Toy::entries(residual.clone()),
            };
            let span = Span::new(step.positions(), &residual, &projection, toy);
            cache.keys_values(LayerIndex::new(layer), span)?;
        }
        cache.commit()?;
    }
    Ok(())
}

#[test]
fn rebuilt_tensors_of_another_shape_or_dtype_are_refused() {
    let kernels = KernelShapes::new(4, 4, 16);
    let shape = ModelShape::new(LAYERS, 64, DType::F32, kernels);
    let conformance = Conformance::probe(&shape.kernels, &Device::flex(), shape.dtype);
    let rebuilt = |plan: Plan| -> Box<dyn CacheBackend> {
        let config = ResidualConfig::new(plan.with_hot(1)).with_certified_eviction(false);
        Box::new(ResidualCheckpoint::new(&shape, &conformance, config).expect("a plan"))
    };
    let ids = || rebuilt(Plan::tokens(&shape));
    let residuals = || rebuilt(Plan::residuals(&shape));
    let sinks = || -> Box<dyn CacheBackend> {
        let config = StreamingLlmConfig::new(2).with_sinks(1);
        Box::new(StreamingLlm::new(&shape, config).expect("a budget"))
    };
    for mut cache in [ids(), residuals(), sinks()] {
        fed(&mut *cache, &Toy(Mistake::None)).expect("nothing is wrong");
    }
    let cases: [(&str, Make<'_>); 6] = [
        ("embedded residuals", &ids),
        ("rebuilt keys", &ids),
        ("rebuilt values", &ids),
        ("replayed residuals", &ids),
        ("rebuilt values", &residuals),
        ("rotated keys", &sinks),
    ];
    for (at, cache) in cases {
        let mut wrong = cache();
        let error = fed(&mut *wrong, &Toy(Mistake::Shape(at))).expect_err(at);
        assert!(
            matches!(error, CacheError::Shape { what, .. } if what == at),
            "{error}"
        );
        assert!(
            fed(&mut *wrong, &Toy(Mistake::None)).is_err(),
            "the step has failed"
        );
        wrong.clear();
        fed(&mut *wrong, &Toy(Mistake::None)).expect("as new");
        let error = fed(&mut *cache(), &Toy(Mistake::Dtype(at))).expect_err(at);
        assert!(
            matches!(error, CacheError::Dtype { what, .. } if what == at),
            "{error}"
        );
    }
}
