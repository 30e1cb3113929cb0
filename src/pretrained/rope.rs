//! Base and scaling of rotary positions. They are read from the older fields of `config.json` (`rope_theta`,
//! `rope_scaling`, `rope_local_base_freq`) and from the newer one (`rope_parameters`, flat or by layer type).

use super::fields::{Fields, Refusal};
use crate::model::{RopeConfig, RopeScaling, yarn_attention_factor};

/// The bases of a family if `config.json` does not state them.
pub(super) enum Bases {
    /// There are none: `config.json` must state them.
    Required,
    /// The base is assumed, with a warning.
    Assumed(f64),
    /// The defaults of the class. Sliding-window layers have their own base, and no scaling.
    Local { full: f64, sliding: f64 },
}

/// Rotation of full-attention layers and of sliding-window layers.
pub(super) struct Ropes {
    pub(super) full: RopeConfig,
    /// `None` if `full_attention` has a base and `sliding_attention` has none, which is an error if a layer needs it.
    pub(super) sliding: Option<RopeConfig>,
    /// The base, if it was assumed.
    pub(super) assumed: Option<f64>,
}

impl Ropes {
    pub(super) fn read(fields: &Fields, bases: &Bases, positions: usize) -> Result<Self, Refusal> {
        let (full_base, full) = layer(fields, FULL, true, "rope_theta", positions)?;
        let (default, (sliding_base, sliding)) = match *bases {
            Bases::Local { sliding, .. } => (
                Some(sliding),
                layer(fields, SLIDING, false, "rope_local_base_freq", positions)?,
            ),
            _ => (None, layer(fields, SLIDING, true, "rope_theta", positions)?),
        };
        let (base, assumed) = match (full_base, bases) {
            (Some(base), _) | (None, &Bases::Local { full: base, .. }) => (base, None),
            (None, &Bases::Assumed(base)) => (base, Some(base)),
            (None, Bases::Required) => return Err(fields.missing("rope_theta")),
        };
        let local = sliding_base.or(default).or(assumed);
        Ok(Self {
            full: RopeConfig::new(base).with_scaling(full),
            sliding: local.map(|base| RopeConfig::new(base).with_scaling(sliding)),
            assumed,
        })
    }

    /// The positions of the model, if the configuration states `stated`. Where YaRN is switched on, that can still be
    /// the original length.
    pub(super) fn positions(&self, stated: usize) -> usize {
        match self.full.scaling {
            RopeScaling::Yarn {
                factor, original, ..
            } => stated.max((factor * original) as usize),
            _ => stated,
        }
    }
}

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// Base and scaling of the layers of one type. Values that are stated twice must be equal.
fn layer(
    fields: &Fields,
    kind: &str,
    flat: bool,
    base_field: &str,
    positions: usize,
) -> Result<(Option<f64>, RopeScaling), Refusal> {
    let mut base = fields.number(base_field)?;
    let mut scaling = None;
    for field in ["rope_parameters", "rope_scaling"] {
        let Some(outer) = fields.object(field)? else {
            continue;
        };
        let nested = outer.get(FULL).is_some() || outer.get(SLIDING).is_some();
        let rope = if nested {
            let mut names = outer.names();
            if let Some(other) = names.find(|name| ![FULL, SLIDING].contains(name)) {
                return Err(outer.unsupported(other));
            }
            outer.object(kind)?
        } else {
            flat.then_some(outer)
        };
        let Some(rope) = rope else { continue };
        let own = rope.number("rope_theta")?;
        if let (Some(own), Some(base)) = (own, base)
            && own != base
        {
            let other = format!("{} = {base}", fields.name(base_field));
            return Err(rope.conflict("rope_theta", other));
        }
        base = base.or(own);
        let found = read_scaling(&rope, positions)?;
        if scaling.is_some_and(|before| before != found) {
            return Err(fields.conflict(field, fields.name("rope_parameters")));
        }
        scaling = Some(found);
    }
    Ok((base, scaling.unwrap_or(RopeScaling::None)))
}

/// All known fields of a scaling. Any other could change the mathematics.
const KNOWN: [&str; 15] = [
    // A note on how the model was made.
    "finetuned",
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "partial_rotary_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
];

fn read_scaling(rope: &Fields, positions: usize) -> Result<RopeScaling, Refusal> {
    if let Some(unknown) = rope.names().find(|name| !KNOWN.contains(name)) {
        return Err(rope.unsupported(unknown));
    }
    let partial = rope.number("partial_rotary_factor")?;
    if partial.is_some_and(|factor| factor != 1.0) {
        return Err(rope.unsupported("partial_rotary_factor"));
    }
    let (kind, old) = (rope.text("rope_type")?, rope.text("type")?);
    if let (Some(kind), Some(old)) = (&kind, &old)
        && kind != old
    {
        return Err(rope.conflict("type", format!("{} = {kind}", rope.name("rope_type"))));
    }
    let named = if kind.is_some() { "rope_type" } else { "type" };
    let needed = |field: &str| rope.number(field)?.ok_or_else(|| rope.missing(field));
    let original = "original_max_position_embeddings";
    match kind.or(old).as_deref() {
        // Without a type, the meaning of the numbers is unknown.
        None if rope.get("factor").is_some() => Err(rope.missing("rope_type")),
        None | Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear {
            factor: needed("factor")?,
        }),
        Some("llama3") => Ok(RopeScaling::Llama3 {
            factor: needed("factor")?,
            low: needed("low_freq_factor")?,
            high: needed("high_freq_factor")?,
            original: needed(original)?,
        }),
        Some("yarn") => {
            for field in ["mscale", "mscale_all_dim"] {
                if rope.get(field).is_some() {
                    return Err(rope.unsupported(field));
                }
            }
            if rope.flag("truncate")? == Some(false) {
                return Err(rope.unsupported("truncate"));
            }
            let positions = positions as f64;
            let original = rope.number(original)?;
            let factor = match (rope.number("factor")?, original) {
                (Some(factor), _) => factor,
                (None, Some(original)) => positions / original,
                (None, None) => return Err(rope.missing("factor")),
            };
            let attention = rope.number("attention_factor")?;
            Ok(RopeScaling::Yarn {
                factor,
                fast: rope.number("beta_fast")?.unwrap_or(32.0),
                slow: rope.number("beta_slow")?.unwrap_or(1.0),
                original: original.unwrap_or(positions),
                attention: attention.unwrap_or_else(|| yarn_attention_factor(factor)),
            })
        }
        Some(_) => Err(rope.unsupported(named)),
    }
}
