//! Speeds as text, to be stored.

use std::{fmt, str::FromStr};

use super::{ChunkSpeed, Speeds};
use crate::cache::{CacheError, Plan};

impl fmt::Display for Speeds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "read {:e}", self.read)?;
        for ChunkSpeed {
            rows,
            projection,
            block,
            attention,
        } in &self.chunks
        {
            write!(
                f,
                "; {rows} rows: projection {projection:e}, block {block:e}, attention {attention:e}"
            )?;
        }
        Ok(())
    }
}

impl FromStr for Speeds {
    type Err = CacheError;

    fn from_str(text: &str) -> Result<Self, CacheError> {
        let wrong = || CacheError::Speeds { text: text.into() };
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
            let (rows, rates) = part.split_once("rows:").ok_or_else(wrong)?;
            let rows = rows
                .trim()
                .parse()
                .ok()
                .filter(|rows| (1..=Plan::WIDEST).contains(rows))
                .ok_or_else(wrong)?;
            let rates: Vec<&str> = rates.split(',').collect();
            let [projection, block, attention] = rates[..] else {
                return Err(wrong());
            };
            Ok(ChunkSpeed {
                rows,
                projection: rate(projection, "projection")?,
                block: rate(block, "block")?,
                attention: rate(attention, "attention")?,
            })
        };
        let mut chunks: Vec<ChunkSpeed> = parts.map(chunk).collect::<Result<_, _>>()?;
        if chunks.is_empty() {
            return Err(wrong());
        }
        chunks.sort_unstable_by_key(|chunk| chunk.rows);
        Ok(Self { read, chunks })
    }
}
