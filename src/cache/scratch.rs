//! The temporaries of a replay's calls.

use super::{ModelShape, ReplayCall};
use crate::exact::{attention_scratch, layers_scratch, stock_attention_scratch};

impl ModelShape {
    /// Bytes of temporaries that a block holds at its peak for `tokens` tokens of up to `sequences` sequences, against
    /// `slots` slots, beside the residual that enters it. An unknown feed-forward layer is left out.
    pub(crate) fn block_scratch(&self, sequences: usize, tokens: usize, slots: usize) -> usize {
        if let Some(scratch) = &self.block.scratch {
            return scratch.0(ReplayCall::Forward {
                sequences,
                tokens,
                slots,
            });
        }
        let (heads, head_dim) = (self.kernels.heads, self.kernels.head_dim);
        let (element, inner) = (self.dtype.size(), self.intermediate.unwrap_or(0));
        let row = tokens * element;
        let attention = match self.own_kernels {
            true => attention_scratch(sequences, (heads, head_dim), tokens, slots),
            false => stock_attention_scratch((heads, self.kv_width()), tokens, slots, element),
        };
        if self.block.native && self.own_kernels {
            // The feed-forward layer adds to what attention returned.
            let result = row * self.hidden;
            let feed_forward = layers_scratch(tokens, self.hidden, Some(inner));
            let queries = 2 * row * heads * head_dim;
            return (queries + attention.max(result)).max(result + feed_forward);
        }
        // The residual with attention added and a normed copy, beside what attention or the feed-forward layer holds.
        let residuals = 2 * row * self.hidden;
        let queries = row * (self.projected() + heads * head_dim);
        // Gate and up side by side and their product; or up, what its activation takes, and a copy for its bias.
        let matrices = 3 + usize::from(self.block.biases && self.block.gated);
        let feed_forward = row * (matrices * inner + self.hidden);
        residuals + (queries + attention).max(feed_forward)
    }

    /// Bytes of temporaries while `tokens` tokens are projected: the normed residual, and keys and values, first side by
    /// side, then apart. Another decoder may hold a second copy of the residual: a centred one, or one for its kernels.
    pub(crate) fn projection_scratch(&self, tokens: usize) -> usize {
        if let Some(scratch) = &self.block.scratch {
            return scratch.0(ReplayCall::Project { tokens });
        }
        let row = tokens * self.dtype.size();
        match self.block.native && self.own_kernels {
            true => row * 4 * self.kv_width() + layers_scratch(tokens, self.hidden, None),
            false => row * (2 * self.hidden + self.projected() + 2 * self.kv_width()),
        }
    }

    /// Elements of a token that the projection of keys and values computes, with copies for biases.
    fn projected(&self) -> usize {
        let queries =
            usize::from(self.block.fused_qkv) * self.kernels.heads * self.kernels.head_dim;
        (queries + 2 * self.kv_width()) * (1 + usize::from(self.block.biases))
    }
}
