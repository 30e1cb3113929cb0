//! One score from those of the query heads that share a KV head.

use std::fmt;

/// How the scores of the query heads that share a KV head become one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Group {
    /// Their mean.
    #[default]
    Mean,
    /// Their sum.
    Sum,
    /// Their maximum.
    Max,
}

impl Group {
    /// The word for an [option](super::Policy::options), which never changes.
    #[must_use]
    pub const fn as_option(self) -> &'static str {
        match self {
            Self::Mean => "mean",
            Self::Sum => "sum",
            Self::Max => "max",
        }
    }

    /// One score for every slot, from those of each head.
    pub fn reduce<S: AsRef<[f32]>>(self, heads: impl IntoIterator<Item = S>) -> Vec<f32> {
        let mut heads = heads.into_iter();
        let mut all = heads.next().map_or_else(Vec::new, |s| s.as_ref().to_vec());
        let mut count = 1;
        for head in heads {
            count += 1;
            let both = all.iter_mut().zip(head.as_ref());
            if self == Self::Max {
                both.for_each(|(one, &more)| *one = one.max(more));
            } else {
                both.for_each(|(one, &more)| *one += more);
            }
        }
        if self == Self::Mean && count > 1 {
            let share = 1.0 / count as f32;
            all.iter_mut().for_each(|score| *score *= share);
        }
        all
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mean => "mean",
            Self::Sum => "sum",
            Self::Max => "maximum",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_become_one_as_asked() {
        let reduced = |group: Group| group.reduce([[1.0, 4.0], [3.0, 0.0]]);
        assert_eq!(reduced(Group::Mean), [2.0, 2.0]);
        assert_eq!(reduced(Group::Sum), [4.0, 4.0]);
        assert_eq!(reduced(Group::Max), [3.0, 4.0]);
    }
}
