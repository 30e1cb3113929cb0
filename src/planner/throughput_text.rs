//! Throughput as text, to be stored.

use std::{fmt, str::FromStr};

use super::{ChunkThroughput, Throughput};
use crate::{cache::CacheError, residual::Plan};

impl fmt::Display for Throughput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "read {:e}", self.read)?;
        for ChunkThroughput {
            tokens,
            projection,
            block,
            attention,
        } in &self.chunks
        {
            write!(
                f,
                "; {tokens} tokens: projection {projection:e}, block {block:e}, attention {attention:e}"
            )?;
        }
        Ok(())
    }
}

impl FromStr for Throughput {
    type Err = CacheError;

    fn from_str(text: &str) -> Result<Self, CacheError> {
        let wrong = || CacheError::Throughput { text: text.into() };
        let rate = |text: &str, name: &str| {
            let number = text
                .trim()
                .strip_prefix(name)
                .and_then(|n| n.trim().parse().ok());
            number
                .filter(|rate: &f64| rate.is_finite() && *rate > 0.0)
                .ok_or_else(wrong)
        };
        let mut parts = text.split(';');
        let read = rate(parts.next().unwrap_or_default(), "read")?;
        let chunk = |part: &str| {
            let (tokens, rates) = part.split_once("tokens:").ok_or_else(wrong)?;
            let tokens = tokens
                .trim()
                .parse()
                .ok()
                .filter(|tokens| (1..=Plan::LARGEST_CHUNK).contains(tokens))
                .ok_or_else(wrong)?;
            let rates: Vec<&str> = rates.split(',').collect();
            let [projection, block, attention] = rates[..] else {
                return Err(wrong());
            };
            Ok(ChunkThroughput {
                tokens,
                projection: rate(projection, "projection")?,
                block: rate(block, "block")?,
                attention: rate(attention, "attention")?,
            })
        };
        let mut chunks: Vec<ChunkThroughput> = parts.map(chunk).collect::<Result<_, _>>()?;
        if chunks.is_empty() {
            return Err(wrong());
        }
        chunks.sort_unstable_by_key(|chunk| chunk.tokens);
        Ok(Self { read, chunks })
    }
}
