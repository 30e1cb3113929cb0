//! Which layers are sliding-window layers: by `layer_types`, else by a pattern, else by the rule of the family.

use std::num::NonZeroUsize;

use super::fields::{Fields, Refusal};

/// The rule of a family if `config.json` has neither layer types nor a pattern.
pub(super) enum Windows {
    /// No layer has a window.
    Never,
    /// With `use_sliding_window`, the layers from `max_window_layers` on have one.
    Switched,
    /// All layers have one, except every sixth.
    Sixth,
}

/// Defaults of the classes of transformers.
const WINDOW: usize = 4096;
const FIRST_SLIDING: usize = 28;
/// No model has more positions, so a larger window is as good as this one.
const LARGEST_WINDOW: usize = 1 << 24;

impl Windows {
    /// The window of each layer.
    pub(super) fn read(
        &self,
        fields: &Fields,
        layers: usize,
    ) -> Result<Vec<Option<NonZeroUsize>>, Refusal> {
        let off = match self {
            Self::Never => true,
            Self::Switched => fields.flag("use_sliding_window")? != Some(true),
            Self::Sixth => false,
        };
        let window = match fields.size("sliding_window")? {
            _ if off => None,
            None if fields.is_null("sliding_window") => None,
            found => Some(found.unwrap_or(WINDOW)),
        };
        let types: Option<Vec<String>> = fields.read("layer_types", "a list of texts")?;
        let sliding: Vec<bool> = if let Some(types) = types {
            if types.len() != layers {
                let other = format!("{} = {layers}", fields.name("num_hidden_layers"));
                return Err(fields.conflict("layer_types", other));
            }
            let sliding = |kind: String| match &kind[..] {
                "full_attention" => Ok(false),
                "sliding_attention" => Ok(true),
                _ => Err(Refusal::Unsupported {
                    field: fields.name("layer_types"),
                    value: kind,
                }),
            };
            types.into_iter().map(sliding).collect::<Result<_, _>>()?
        } else if window.is_none() && !matches!(self, Self::Sixth) {
            vec![false; layers]
        } else {
            let mut pattern = None;
            for field in ["sliding_window_pattern", "_sliding_window_pattern"] {
                if fields.size(field)? == Some(0) {
                    return Err(fields.unsupported(field));
                }
                pattern = pattern.or(fields.size(field)?);
            }
            let first = fields.size("max_window_layers")?.unwrap_or(FIRST_SLIDING);
            let slides = |layer: usize| match (pattern, self) {
                (Some(pattern), _) => !(layer + 1).is_multiple_of(pattern),
                (None, Self::Sixth) => !(layer + 1).is_multiple_of(6),
                (None, _) => layer >= first,
            };
            (0..layers).map(slides).collect()
        };
        if !sliding.contains(&true) {
            return Ok(vec![None; layers]);
        }
        let window = match (self, window) {
            (Self::Never, _) => Err(Refusal::Unsupported {
                field: fields.name("layer_types"),
                value: "sliding_attention".into(),
            }),
            (Self::Switched, None) if off => Err(Refusal::Conflict {
                field: fields.name("layer_types"),
                value: "sliding_attention".into(),
                other: format!("{} that is not true", fields.name("use_sliding_window")),
            }),
            (_, None) => Err(fields.missing("sliding_window")),
            (_, Some(window)) => NonZeroUsize::new(window.min(LARGEST_WINDOW))
                .ok_or_else(|| fields.unsupported("sliding_window")),
        }?;
        let windows = sliding.into_iter().map(|sliding| sliding.then_some(window));
        Ok(windows.collect())
    }
}
