//! Stop strings.

use kv_direct::text::{Stops, TextError};
use proptest::prelude::*;

fn stops(list: &[&str]) -> Stops {
    let mut stops = Stops::new();
    for stop in list {
        stops.add(*stop).expect("not empty");
    }
    stops
}

#[test]
fn a_stop_string_is_never_shown() {
    let mut end = stops(&["</end>"]);
    assert_eq!(end.push("a < b </"), "a < b ");
    assert_eq!(end.push("en"), "");
    assert_eq!(end.push("emy> </end"), "</enemy> ");
    assert_eq!(end.push("> behind"), "");
    assert_eq!(end.found(), Some("</end>"));
    assert_eq!(end.push("more") + &end.finish(), "");
}

#[test]
fn held_back_text_is_shown_at_the_end() {
    let mut end = stops(&["END"]);
    assert_eq!(end.push("the EN"), "the ");
    assert_eq!(end.finish(), "EN");
    assert_eq!(end.found(), None);
}

#[test]
fn the_first_to_begin_wins_then_the_first_listed() {
    let found = |list: &[&str], text: &str| {
        let mut stops = stops(list);
        let mut shown: String = text.chars().map(|c| stops.push(&c.to_string())).collect();
        shown += &stops.finish();
        (shown, stops.found().map(str::to_owned))
    };
    let some = |shown: &str, stop: &str| (shown.to_owned(), Some(stop.to_owned()));
    assert_eq!(found(&["c", "bcd"], "abcd"), some("a", "bcd"));
    assert_eq!(found(&["c", "bcd"], "abce"), some("ab", "c"));
    assert_eq!(found(&["b", "bc"], "abc"), some("a", "b"));
    assert_eq!(found(&["bc", "b"], "abc"), some("a", "bc"));
    assert_eq!(found(&["bc", "b"], "ab"), some("a", "b"));
    assert_eq!(found(&["aab"], "aaab"), some("a", "aab"));
}

#[test]
fn an_empty_stop_string_is_refused() {
    assert!(matches!(Stops::new().add(""), Err(TextError::EmptyStop)));
}

proptest! {
    #[test]
    fn they_do_not_depend_on_how_the_text_is_cut(
        text in "[abc\u{e9}]{0,24}",
        list in prop::collection::vec("[abc\u{e9}]{1,4}", 0..4),
        sizes in prop::collection::vec(1usize..5, 24),
    ) {
        // The oracle searches the whole text: the first place, and there the first of the list.
        let oracle = text.char_indices().find_map(|(at, _)| {
            let stop = list.iter().find(|stop| text[at..].starts_with(&***stop))?;
            Some((text[..at].to_owned(), stop.as_str()))
        });
        let mut stops = Stops::new();
        for stop in &list {
            stops.add(stop).unwrap();
        }
        let (mut shown, mut rest) = (String::new(), text.chars().peekable());
        for size in sizes {
            let piece: String = rest.by_ref().take(size).collect();
            shown += &stops.push(&piece);
            prop_assert!(text.starts_with(&shown));
        }
        shown += &stops.finish();
        match oracle {
            Some((before, stop)) => {
                prop_assert_eq!(shown, before);
                prop_assert_eq!(stops.found(), Some(stop));
            }
            None => {
                prop_assert_eq!(shown, text);
                prop_assert_eq!(stops.found(), None);
            }
        }
    }
}
