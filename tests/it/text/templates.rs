//! Templates against what jinja2 3.1.6 renders in the environment of transformers.

use kv_direct::text::{Message, TextError};
use serde_json::json;

use crate::support::tokenizer_folder::Folder;

/// The rendering of one template for two messages.
fn rendered(template: &str) -> Result<String, TextError> {
    let folder = Folder::tiny("templates");
    let config = json!({ "chat_template": template });
    folder.write("tokenizer_config.json", &config.to_string());
    let messages = [Message::new("user", "q"), Message::new("assistant", "a")];
    folder.tokenizer().render(&messages, false)
}

/// Pairs of a template and its rendering.
fn equal(pairs: &[(&str, &str)]) {
    for (template, expected) in pairs {
        match rendered(template) {
            Ok(found) => assert_eq!(found, *expected, "{template}"),
            Err(error) => panic!("{template}: {error:?}"),
        }
    }
}

/// Templates that Python refuses, too.
fn refused(templates: &[&str]) {
    for template in templates {
        match rendered(template) {
            Err(TextError::Template { .. }) => {}
            found => panic!("{template}: {found:?}"),
        }
    }
}

#[test]
fn a_loop_over_a_text_knows_its_length() {
    equal(&[
        (
            "{% for c in 'añb' %}{{ c }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }} {% endfor %}",
            "aFalse33 ñFalse32 bTrue31 ",
        ),
        (
            "{% for c in 'abc' if c != 'c' %}{{ loop.nextitem }}{{ loop.last }}{% endfor %}",
            "bFalseTrue",
        ),
        (
            "{% for c in ('ab' if true else '') recursive %}{{ loop.revindex0 }}{% endfor %}",
            "10",
        ),
        (
            "{% for m in messages|map(attribute='role') %}{{ m }}{{ loop.last }}{% endfor %}",
            "userFalseassistantTrue",
        ),
    ]);
    refused(&["{% for x in none %}{% endfor %}"]);
}

#[test]
fn sequences_are_those_of_python() {
    let sequences = [
        "messages[1:]",
        "range(3)",
        "'text'",
        "{}",
        "(1, 2)",
        "nothing",
        "messages|list",
        "messages|sort(attribute='role')",
    ];
    let others = [
        "messages|map(attribute='role')",
        "messages|select",
        "messages | selectattr ( 'role' )",
        "messages|batch(2)",
        "messages|reverse",
        "messages[0].items()",
        "messages[0].keys()",
        "namespace()",
        "none",
        "1",
    ];
    for (expressions, expected) in [(&sequences[..], "True"), (&others[..], "False")] {
        for expression in expressions {
            equal(&[(&format!("{{{{ {expression} is sequence }}}}"), expected)]);
        }
    }
    equal(&[
        ("{{ true is integer }}{{ 1 is integer }}", "FalseTrue"),
        (
            "{{ namespace() is mapping }}{{ {} is mapping }}",
            "FalseTrue",
        ),
    ]);
    refused(&["{{ messages|map(attribute='role')|tojson }}"]);
}

#[test]
fn the_generation_tag_is_a_scope_and_only_where_it_is_a_tag() {
    equal(&[
        (
            "{% set z = 1 %}{%- generation -%} {% set z = 5 %}{{ z }}{% endgeneration %}{{ z }}",
            "51",
        ),
        (
            "{% set t = '{% generation %}' %}{{ t }}",
            "{% generation %}",
        ),
        (
            "{% raw %}{% generation %}{% endraw %}{# {% generation %} #}x",
            "{% generation %}x",
        ),
        ("{% generation %}\n  x\n{% endgeneration %}\ny", "  x\ny"),
    ]);
    refused(&["{% generation %}"]);
}

#[test]
fn strings_have_the_escapes_of_python() {
    equal(&[
        (r"{{ '\U0001F600\u00e9\x41\101' }}", "😀éAA"),
        (r"{{ '\N{LATIN SMALL LETTER A WITH ACUTE}' }}", "á"),
        (r"{{ 'a\a\b\v\f' | length }}{{ '\0' | length }}", "51"),
        (
            r#"{{ '\'' }}{{ "\"" }}{{ '\\n' }}{{ 'é\n' }}|"#,
            "'\"\\né\n|",
        ),
        ("{{ 'x\\\ny' }}", "xy"),
        (
            r"{{ 'a\qb' }}{{ '\8' }}{{ 'a\/b' }}{{ '\é' }}",
            r"a\qb\8a\/b\xe9",
        ),
    ]);
    refused(&[
        r"{{ '\x4' }}",
        r"{{ '\N{NO SUCH NAME}' }}",
        r"{{ '\U00110000' }}",
    ]);
}

#[test]
fn dates_are_those_of_python_without_a_zone() {
    equal(&[
        (
            "{{ strftime_now('%x')|length }}{{ strftime_now('%X')|length }}",
            "88",
        ),
        (
            "{{ strftime_now('%c')|length }}{{ strftime_now('%f')|length }}",
            "246",
        ),
        (
            "[{{ strftime_now('%Z%z') }}]{{ strftime_now(format='%Y')|length }}",
            "[]4",
        ),
        (
            "{{ strftime_now('100%') }}{{ strftime_now('%!%Q%') }}",
            "100%%!%Q%",
        ),
        (
            "{{ strftime_now('%D') == strftime_now('%m/%d/%y') }}",
            "True",
        ),
        (
            "{{ strftime_now('%^b') == strftime_now('%b')|upper }}",
            "True",
        ),
        ("{{ strftime_now('é%%%n') }}|", "é%\n|"),
    ]);
}

#[test]
fn white_space_and_lines_are_those_of_python() {
    equal(&[
        (
            "{{ '\x1cx\x1f'.strip() }}{{ '\x1dx\x1e'|trim }}{{ '\x1c'.isspace() }}",
            "xxTrue",
        ),
        (
            "{{ ' \x1fa '.lstrip() }}|{{ ' a\x1f '.rstrip() }}|",
            "a | a|",
        ),
        ("{{ 'xaxbx'.strip('x') }}{{ 'xax'|trim('x') }}", "axba"),
        (
            "{{ '\x1fa b\u{2003}c'.split() }}{{ 'a b  c '.split(None, 1) }}",
            "['a', 'b', 'c']['a', 'b  c ']",
        ),
        (
            "{{ 'a b c'.split(maxsplit=1) }}{{ 'a,b'.split(sep=',') }}",
            "['a', 'b c']['a', 'b']",
        ),
        (
            "{{ 'a\x0bb\x0cc\x1cd\u{85}e\u{2028}f'.splitlines()|length }}",
            "6",
        ),
        (
            "{{ 'a\\r\\nb\\n\\nc\\n'.splitlines() }}",
            "['a', 'b', '', 'c']",
        ),
        ("{{ 'a\\nb'.splitlines(keepends=True) }}", "['a\\n', 'b']"),
    ]);
}

#[test]
fn floats_are_written_in_their_shortest_form() {
    equal(&[
        (
            "{{ 1e16 }} {{ 1e-7 }} {{ 1e15 }} {{ 0.0001 }} {{ 2.0 }}",
            "1e+16 1e-07 1000000000000000.0 0.0001 2.0",
        ),
        (
            "{{ [1e16, {'a': 1e-7}] }} {{ (1.5,) }}",
            "[1e+16, {'a': 1e-07}] (1.5,)",
        ),
        (
            "{{ 'x' ~ 1e16 ~ [1e-7] }} {{ 1e-7|string }} {{ [1e16]|join }}",
            "x1e+16[1e-07] 1e-07 1e+16",
        ),
        ("{{ [1e16, 1e-7, 1.0]|tojson }}", "[1e+16, 1e-07, 1.0]"),
        ("{{ 'inf'|float }} {{ 'inf'|float|tojson }}", "inf Infinity"),
    ]);
}

#[test]
fn operands_of_a_tilde_stay_what_they_are() {
    equal(&[
        ("{{ - 1 ~ -2 }} {{ 2 * 3 ~ 4 * 5 }}", "-1-2 620"),
        (
            "{{ not 'a' ~ 'b' }} {{ 'x' if 'a' ~ 'b' else 'y' ~ 'z' }}",
            "False x",
        ),
        (
            "{{ ['a' ~ 1, 'b' ~ 2]|join('-') }} {{ {'a': 'b' ~ 'c'} }}",
            "a1-b2 {'a': 'bc'}",
        ),
        ("{{- ('a' ~ 'b')|upper ~ 'c'|upper -}}", "ABC"),
        (
            "{% if 'a' ~ 'b' == 'ab' and 1 ~ 2 == '12' %}yes{% elif 'x' ~ 'y' %}no{% endif %}",
            "yes",
        ),
        (
            "{{ 'a' ~ 'b' is in ['ab'] }} {{ 'a' ~ 1 is not none }}",
            "aFalse aTrue",
        ),
        (
            "{{ [1, 2][0] ~ {'a': 3}['a'] ~ messages[0].role|upper ~ none ~ nothing }}",
            "13USERNone",
        ),
        (
            "{% macro f(a, b='x' ~ 'y') %}{{ a ~ b }}{% endmacro %}{{ f(1) ~ f(1, b='z' ~ 1e1) }}",
            "1xy1z10.0",
        ),
        (
            "{% set x = 'a' ~ 1 ~ 'b' %}{% set a, b = 1, 'c' ~ 2 %}{{ x ~ a ~ b }}",
            "a1b1c2",
        ),
    ]);
}

#[test]
fn what_is_added_to_a_safe_text_is_escaped() {
    equal(&[
        ("{{ '<a>'|safe + '<b>' + 'c\"d' }}", "<a>&lt;b&gt;c&#34;d"),
        ("{{ '<' + '>'|safe }}{{ '<' + '>' }}", "&lt;><>"),
        (
            "{{ 'x' ~ ('<a>'|safe + '<b>') ~ '<c>' }}",
            "x<a>&lt;b&gt;<c>",
        ),
        ("{% set x = 'a' | escape + '<' %}{{ x }}", "a&lt;"),
        ("{{ 1 + 1 - 1 + 3 }}{{ 'a' + 'b' ~ 'c' + 'd' }}", "4abcd"),
    ]);
}

#[test]
fn json_is_that_of_python() {
    equal(&[
        (
            "{{ {'b': 1, 2: none, none: true}|tojson }}",
            r#"{"b": 1, "2": null, "null": true}"#,
        ),
        (
            "{{ {'b': [], 'a': {}}|tojson(indent=1, sort_keys=true) }}",
            "{\n \"a\": {},\n \"b\": []\n}",
        ),
        (
            "{{ [[1], (2, 'x')]|tojson(indent='-') }}",
            "[\n-[\n--1\n-],\n-[\n--2,\n--\"x\"\n-]\n]",
        ),
        ("{{ 'é\\x7f<&\\x01\\n'|tojson }}", "\"é\x7f<&\\u0001\\n\""),
        (
            "{{ 'é😀\\x7f'|tojson(ensure_ascii=true) }}",
            r#""\u00e9\ud83d\ude00\u007f""#,
        ),
        ("{{ [1, 2]|tojson(separators=(',', ':')) }}", "[1,2]"),
    ]);
    refused(&["{{ nothing|tojson }}", "{{ [namespace]|tojson }}"]);
}

#[test]
fn variables_and_fields_of_the_callers_own_reach_the_template() {
    let folder = Folder::tiny("variables");
    let template = "{{ tools|tojson }} {{ enable_thinking }} {{ documents }} {{ bos_token }} {{ messages[0].name }} \
                    {{ messages[0].content[0].text }}";
    let config = json!({ "chat_template": template, "bos_token": "<s>" });
    folder.write("tokenizer_config.json", &config.to_string());
    let message = Message::new("user", "");
    let message = message
        .with("name", "Ada")
        .with("content", &[json!({"text": "hi"})]);
    let variables = json!({ "tools": [{"f": 1e-7}], "enable_thinking": false, "bos_token": "<b>", "messages": [] });
    let text = folder.tokenizer().render_with(&[message], true, &variables);
    assert_eq!(
        text.expect("a good template"),
        "[{\"f\": 1e-07}] False None <b> Ada hi"
    );
}
