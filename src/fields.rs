//! Named fields in canonical form: what states, session files and fingerprints compare.
//!
//! A number is decimal; a float is the shortest text that reads back as the same number, without an exponent. Truth is
//! `true` or `false`. Everything else is a word that is chosen here, never the name of a variant. These texts are in
//! files, so they never change. A field that is added later is left out while it has the value that it always had.

use std::collections::BTreeMap;

use burn::tensor::DType;

/// Fields by name.
pub(crate) type Fields = BTreeMap<String, String>;

/// Where and how two sets of fields differ first: the name, and both values.
pub(crate) type Difference<'a> = (&'a str, Option<&'a str>, Option<&'a str>);

/// The word for a dtype.
pub(crate) fn dtype_word(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "f64",
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        other => other.name(),
    }
}

/// The first field, by name, that is not the same in both.
pub(crate) fn difference<'a>(one: &'a Fields, other: &'a Fields) -> Option<Difference<'a>> {
    let value = |of: &'a Fields, name: &str| of.get(name).map(String::as_str);
    let names = one.keys().chain(other.keys());
    let both = names.map(|name| (&name[..], value(one, name), value(other, name)));
    both.filter(|(_, one, other)| one != other).min()
}

/// A line for each field, sorted by name: `LENGTH NAME LENGTH VALUE`, lengths in bytes. Fields that differ have other
/// lines.
#[cfg(any(feature = "model", feature = "session"))]
pub(crate) fn lines(fields: &Fields) -> String {
    let line = |(name, value): (&String, &String)| {
        format!("{} {name} {} {value}\n", name.len(), value.len())
    };
    fields.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields<const N: usize>(all: [(&str, &str); N]) -> Fields {
        let owned = all.map(|(name, value)| (name.to_owned(), value.to_owned()));
        Fields::from(owned)
    }

    #[test]
    fn the_first_difference_is_named_with_both_values() {
        let one = fields([("a", "1"), ("b", "2"), ("d", "4")]);
        assert_eq!(difference(&one, &one), None);
        let other = fields([("a", "1"), ("b", "3"), ("c", "4")]);
        assert_eq!(difference(&one, &other), Some(("b", Some("2"), Some("3"))));
        let fewer = fields([("b", "2"), ("d", "4")]);
        assert_eq!(difference(&fewer, &one), Some(("a", None, Some("1"))));
    }

    #[cfg(any(feature = "model", feature = "session"))]
    #[test]
    fn lines_tell_names_from_values() {
        assert_eq!(
            lines(&fields([("b", "2"), ("a", "x y")])),
            "1 a 3 x y\n1 b 1 2\n"
        );
        assert_ne!(
            lines(&fields([("a", "1\n1 b 1 2")])),
            lines(&fields([("a", "1"), ("b", "2")]))
        );
    }
}
