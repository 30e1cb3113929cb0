//! Policies and splits into steps, fixed and random.

use kv_direct::policy::{Group, Pooling};
use proptest::{prelude::*, sample::select};

use crate::support::{
    driver::Steps,
    simulator::{
        Amount::{self, Entries, Share},
        Policy,
    },
};

/// A prompt of 26 in one step, then single tokens.
pub fn plain() -> Steps {
    let mut steps = vec![(vec![26], false)];
    steps.resize(13, (vec![1], false));
    steps
}

/// A prompt in uneven chunks, then steps of one token and of several.
pub fn chunked() -> Steps {
    let prompt = [(7, true), (1, true), (13, true), (5, false)];
    let rest = [
        (1, false),
        (6, false),
        (1, false),
        (3, true),
        (2, false),
        (1, false),
    ];
    let steps = prompt.into_iter().chain(rest);
    steps.map(|(tokens, more)| (vec![tokens], more)).collect()
}

/// Steps of several tokens that do not announce more.
pub fn unannounced() -> Steps {
    [9, 1, 12, 4, 1, 1, 7, 3]
        .map(|tokens| (vec![tokens], false))
        .into()
}

/// Sequences of different lengths, each idle in some step.
pub fn ragged() -> Steps {
    vec![
        (vec![9, 3, 20], true),
        (vec![8, 0, 1], true),
        (vec![3, 11, 2], false),
        (vec![1, 1, 1], false),
        (vec![0, 4, 1], false),
        (vec![5, 1, 0], false),
        (vec![1, 1, 1], false),
    ]
}

pub fn snap(budget: Amount, window: usize) -> Policy {
    Policy::Snap {
        budget,
        window,
        pooling: Pooling::Average,
        kernel: 3,
        group: Group::Mean,
    }
}

pub fn one_of_each() -> Vec<Policy> {
    let streaming = |reindexed| Policy::Streaming {
        sinks: 2,
        recent: Entries(6),
        reindexed,
    };
    let h2o = |budget| Policy::H2o {
        budget,
        recent: Entries(3),
        sinks: 1,
        group: Group::Mean,
    };
    let tova = |budget| Policy::Tova {
        budget,
        protect_last: false,
    };
    vec![
        Policy::Window { size: 6 },
        streaming(false),
        streaming(true),
        h2o(Entries(8)),
        h2o(Share(0.4)),
        tova(Entries(8)),
        tova(Share(0.4)),
        snap(Entries(8), 3),
        snap(Share(0.4), 3),
    ]
}

/// A policy with a budget of at most `most` entries, or a share.
pub fn any_policy(most: usize) -> impl Strategy<Value = Policy> {
    let amount = move |least: usize| {
        prop_oneof![
            3 => (least..=most).prop_map(Entries),
            1 => (0.05f64..=1.0).prop_map(Share),
        ]
    };
    let group = || select(vec![Group::Mean, Group::Sum, Group::Max]);
    let streaming = (0usize..8, amount(1), any::<bool>());
    let h2o = (amount(1), 0.0..=1.0, 0.0..=1.0, group());
    let snap = (
        amount(2),
        0.0..=1.0,
        select(vec![Pooling::Average, Pooling::Max]),
        select(vec![1usize, 3, 5, 7, 31]),
        group(),
    );
    prop_oneof![
        (1..most).prop_map(|size| Policy::Window { size }),
        streaming.prop_map(|(sinks, recent, reindexed)| Policy::Streaming {
            sinks,
            recent,
            reindexed,
        }),
        h2o.prop_map(|(budget, recent, sinks, group)| {
            let part = |share: f64, of: usize| (share * of as f64).round() as usize;
            let (recent, sinks) = match budget {
                Entries(entries) => {
                    let recent = part(recent, entries);
                    (Entries(recent), part(sinks, entries - recent))
                }
                Share(share) => (Share((share * recent).max(0.01)), part(sinks, 6)),
            };
            Policy::H2o {
                budget,
                recent,
                sinks,
                group,
            }
        }),
        (amount(1), any::<bool>()).prop_map(|(budget, protect_last)| Policy::Tova {
            budget,
            protect_last,
        }),
        snap.prop_map(|(budget, window, pooling, kernel, group)| Policy::Snap {
            budget,
            window: match budget {
                Entries(entries) => ((window * entries as f64) as usize).clamp(1, entries - 1),
                Share(_) => 1 + (window * 9.0) as usize,
            },
            pooling,
            kernel,
            group,
        }),
    ]
}
