//! No template ends the process or takes more than its share of memory and time.

use std::time::{Duration, Instant};

use kv_direct::text::{Message, TextError, Tokenizer};
use proptest::{prelude::*, sample::select};
use serde_json::json;

use crate::support::{
    allocator::measure,
    cases::{check, runner},
    fuzz::fuzz_cases,
    tokenizer_folder::Folder,
};

/// The most bytes that a rendering may hold.
const BYTES: usize = 256 << 20;

fn tokenizer(template: &str) -> Tokenizer {
    let folder = Folder::tiny("limits");
    let config = json!({ "chat_template": template });
    folder.write("tokenizer_config.json", &config.to_string());
    folder.tokenizer()
}

/// Renders within bounds, whatever the outcome.
fn bounded(template: &str) -> Result<String, TextError> {
    let tokenizer = tokenizer(template);
    let begin = Instant::now();
    let messages = [Message::new("user", "x")];
    let (rendered, peak, _) = measure(|| tokenizer.render(&messages, true));
    let short: String = template.chars().take(80).collect();
    assert!(peak <= BYTES, "{short}: {peak} bytes");
    assert!(begin.elapsed() < Duration::from_secs(30), "{short}");
    rendered
}

#[test]
fn templates_beyond_the_limits_are_errors() {
    let repeated = |begin: &str, part: &str, times: usize, end: &str| {
        format!("{begin}{}{end}", part.repeat(times))
    };
    let templates = [
        repeated("{{ 1", "+1", 20_000, " }}"),
        repeated("{{ x", "|string", 20_000, " }}"),
        repeated("{% if 0 %}", "{% elif 0 %}", 20_000, "{% endif %}"),
        repeated("{{ ", "[", 100_000, " }}"),
        repeated("", "{% if 1 %}", 10_000, ""),
        repeated("", "{% generation %}", 10_000, ""),
        repeated("", "x", 600_000, ""),
        repeated("{{ [1]", "|batch(1)", 700, " }}"),
        repeated("{% set x = [1] %}", "{% set x = [x] %}", 1_000, "{{ x }}"),
        repeated("{% set x = [1] %}", "{% set x = [x, x] %}", 60, "{{ x }}"),
        repeated("{{ ", "9", 500_000, " }}"),
        "{% set n = namespace(x=[]) %}{% for i in range(100000) %}{% set n.x = [n.x] %}{% endfor %}".into(),
        "{% set n = namespace(x='ab') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}".into(),
        "{% set n = namespace(x=[1]) %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}".into(),
        "{% for a in range(100000) %}{% for b in range(100000) %}{{ a }}{% endfor %}{% endfor %}".into(),
        "{% macro f(x) %}{{ f([[[[[[x]]]]]]) }}{% endmacro %}{{ f(1) }}".into(),
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}".into(),
        "{{ 'x' * 10000000000 }}".into(),
        "{{ [0] * 10000000000 }}".into(),
        "{{ '%1000000000d'|format(1) }}".into(),
        "{{ '{:>9999999999}'.format('x') }}".into(),
        "{{ '{:.999999999f}'.format(1.5) }}".into(),
        "{{ 'a\nb'|indent(1000000000) }}".into(),
        "{{ range(100000)|join('x' * 100000) }}".into(),
        "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}".into(),
        "{{ ('a' * 100000).replace('a', 'b' * 100000) }}".into(),
        "{{ [1]|batch(100000000, 0)|list }}".into(),
        "{% for x in [1] %}{{ loop.cycle() }}{% endfor %}".into(),
    ];
    for template in templates {
        let short: String = template.chars().take(80).collect();
        match bounded(&template) {
            Err(TextError::Template { .. }) => {}
            found => panic!("{short}: {:?}", found.map(|text| text.len())),
        }
    }
}

/// The limits are far above what templates need.
#[test]
fn long_honest_templates_are_rendered() {
    let sum = format!("{{{{ 1{} }}}}", "+1".repeat(900));
    assert_eq!(bounded(&sum).expect("a sum"), "901");
    let chains = format!("{{{{ a{} }}}}", " ~ a".repeat(500)).repeat(200);
    assert_eq!(bounded(&chains).expect("chains"), "");
    let branches = format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(1_500));
    assert_eq!(bounded(&branches).expect("branches"), "");
    let nested = "{% for m in messages %}{% for n in messages %}{{ n.content|trim }}{% endfor %}{% endfor %}";
    let tokenizer = tokenizer(nested);
    let messages = vec![Message::new("user", " hello ".repeat(4)); 300];
    let text = tokenizer
        .render(&messages, true)
        .expect("within the limits");
    assert_eq!(text.len(), 300 * 300 * 26);
}

#[test]
fn a_namespace_that_would_hold_itself_is_refused() {
    for template in [
        "{% set n = namespace() %}{% set n.x = n %}{{ n }}",
        "{% set n = namespace() %}{% set n.x = [{'a': n}] %}{{ n }}",
        "{% set a = namespace() %}{% set b = namespace(x=a) %}{% set a.y = b %}{{ a }}",
    ] {
        let found = bounded(template);
        assert!(
            matches!(found, Err(TextError::Template { .. })),
            "{found:?}"
        );
    }
}

/// Expressions of a grammar, most of them with a meaning.
fn expression() -> impl Strategy<Value = String> {
    let leaf = select(vec![
        "1",
        "-1",
        "0",
        "1e16",
        "9223372036854775807",
        "'a'",
        "'é\\n'",
        "''",
        "none",
        "true",
        "messages",
        "n",
        "n.x",
        "x",
        "loop",
        "loop.index",
        "range(3)",
        "messages[0]",
        "messages[0].content",
        "{}",
        "[]",
        "nothing",
    ])
    .prop_map(str::to_owned);
    leaf.prop_recursive(5, 40, 3, |inner| {
        let operator = select(vec![
            "+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "and", "or", "in", "not in",
        ]);
        let filter = select(vec![
            "|string",
            "|list",
            "|length",
            "|first",
            "|last",
            "|trim",
            "|tojson",
            "|tojson(indent=2)",
            "|reverse",
            "|sort",
            "|join(',')",
            "|upper",
            "|map('string')",
            "|select",
            "|batch(2)",
            "|slice(2)",
            "|int",
            "|float",
            "|round",
            "|abs",
            "|items",
            "|dictsort",
            "|unique",
            "|default('d')",
            "|replace('a', 'bb')",
            "|indent(3)",
            "|sum",
            "|min",
            "|max",
            "|groupby('role')",
            "|selectattr('role')",
            "|e",
            "|title",
            "|format(1)",
            ".split()",
            ".splitlines()",
            ".strip()",
            ".items()",
            ".keys()",
            ".format(1)",
            ".get('a')",
            "[0]",
            "[1:]",
            "[::-1]",
            ".x",
            "()",
            " is sequence",
            " is defined",
            " is mapping",
            ".cycle(1)",
            ".changed(1)",
            ".count('a')",
            ".find('a')",
        ]);
        prop_oneof![
            (inner.clone(), operator, inner.clone()).prop_map(|(a, op, b)| format!("{a} {op} {b}")),
            (inner.clone(), filter).prop_map(|(a, filter)| format!("({a}){filter}")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("[{a}, {b}]")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("{{'a': {a}, 'b': {b}}}")),
            (inner.clone(), inner.clone(), inner.clone())
                .prop_map(|(a, b, c)| format!("({a} if {b} else {c})")),
            (inner.clone(), inner.clone(), inner).prop_map(|(a, b, c)| format!("({a})[{b}:{c}]")),
        ]
    })
}

/// Templates of a grammar.
fn template() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        expression().prop_map(|e| format!("{{{{ {e} }}}}")),
        expression().prop_map(|e| format!("{{% set x = {e} %}}")),
        expression().prop_map(|e| format!("{{% set n.x = {e} %}}")),
        select(vec![
            "text\n",
            "{# c #}",
            "{% break %}",
            "{{ f(x) }}",
            "{%- raw -%}{{ x }}{% endraw %}",
            "{{",
            "%}"
        ])
        .prop_map(str::to_owned),
    ];
    let body = leaf.prop_recursive(4, 30, 4, |inner| {
        let blocks = prop::collection::vec(inner, 1..4).prop_map(|parts| parts.concat());
        (expression(), blocks, 0..6).prop_map(|(e, body, kind)| match kind {
            0 => format!("{{% for x in {e} %}}{body}{{% endfor %}}"),
            1 => {
                format!("{{% for x in {e} if x recursive %}}{body}{{{{ loop(x) }}}}{{% endfor %}}")
            }
            2 => format!("{{% if {e} %}}{body}{{% elif x %}}{body}{{% else %}}{body}{{% endif %}}"),
            3 => format!("{{% generation %}}{body}{{% endgeneration %}}"),
            4 => format!("{{% macro f(x) %}}{body}{{{{ f([x, {e}]) }}}}{{% endmacro %}}"),
            _ => format!("{{% set x %}}{body}{{% endset %}}"),
        })
    });
    body.prop_map(|body| format!("{{% set n = namespace(x=1) %}}{body}{{{{ n }}}}{{{{ f(1) }}}}"))
}

#[test]
fn templates_of_a_grammar_are_rendered_or_refused_within_bounds() {
    check(runner(fuzz_cases(300)), &template(), |template| {
        let _ = bounded(&template);
        Ok(())
    });
}
