//! Clients that come and go, and check every reply against the conversation alone.

use std::{
    fmt,
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kv_direct::{FullKv, generate::Generation};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    task::spawn_blocking,
};

use crate::Server;

const WORDS: [&str; 12] = [
    "sky", "blue", "why", "is", "the", "river", "long", "and", "how", "far", "a", "fox",
];

/// What the clients saw.
#[derive(Default)]
pub(crate) struct Report {
    pub(crate) replies: usize,
    pub(crate) conversations: usize,
    /// Clients that left before their reply came.
    pub(crate) left: usize,
    pub(crate) most_bytes: usize,
    pub(crate) most_together: usize,
    /// The longest wait for a reply.
    longest: Duration,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            replies,
            conversations,
            left,
            most_bytes,
            most_together,
            longest,
        } = self;
        write!(
            f,
            "{replies} replies in {conversations} conversations, each equal to that of the conversation alone; {left} \
             clients left early; at most {most_together} in a step and {most_bytes} bytes of caches; longest wait {longest:.1?}"
        )
    }
}

/// Runs this many clients for a while.
///
/// # Errors
/// A reply that is missing or wrong.
pub(crate) async fn run(
    server: &Arc<Server>,
    address: SocketAddr,
    clients: usize,
    seconds: Duration,
) -> Result<Report> {
    let end = Instant::now() + seconds;
    let clients = (0..clients as u32).map(|seed| {
        let server = Arc::clone(server);
        tokio::spawn(async move { client(&server, address, seed, end).await })
    });
    let mut all = Report::default();
    for client in clients.collect::<Vec<_>>() {
        let one = client.await??;
        all.replies += one.replies;
        all.conversations += one.conversations;
        all.left += one.left;
        all.longest = all.longest.max(one.longest);
    }
    let figures = &server.engine.figures;
    all.most_bytes = figures.most_bytes.load(Ordering::Relaxed);
    all.most_together = figures.most_together.load(Ordering::Relaxed);
    Ok(all)
}

/// One conversation after another.
async fn client(
    server: &Arc<Server>,
    address: SocketAddr,
    seed: u32,
    end: Instant,
) -> Result<Report> {
    let mut report = Report::default();
    let mut state = seed;
    let mut random = |below: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) % below
    };
    while Instant::now() < end {
        let mut stream = TcpStream::connect(address).await?;
        let (read, mut write) = stream.split();
        let mut lines = BufReader::new(read).lines();
        let mut said = Vec::new();
        for _ in 0..=random(4) {
            let count = 1 + random(16);
            let words: Vec<&str> = (0..count).map(|_| WORDS[random(12) as usize]).collect();
            let question = words.join(" ");
            let asked = Instant::now();
            write.write_all(format!("{question}\n").as_bytes()).await?;
            if random(10) == 0 {
                report.left += 1;
                break;
            }
            let reply = lines.next_line().await?.context("the reply is missing")?;
            report.longest = report.longest.max(asked.elapsed());
            said.push((question, reply));
        }
        report.conversations += 1;
        report.replies += said.len();
        let server = Arc::clone(server);
        spawn_blocking(move || check(&server, &said)).await??;
    }
    Ok(report)
}

/// Compares the replies with those of a cache that holds everything, and nobody else.
fn check(server: &Server, said: &[(String, String)]) -> Result<()> {
    let decoder = &server.model.decoder;
    let mut cache = FullKv::new(&decoder.shape());
    let mut last = None;
    for (question, reply) in said {
        let mut ids: Vec<u32> = last.into_iter().collect();
        ids.extend(server.tokenizer.encode_plain(question)?);
        let new = Generation::new(decoder, &mut cache, &ids)?
            .with_eos(&server.model.eos)
            .with_max_new(server.reply);
        let new: Vec<u32> = new.collect::<Result<_, _>>()?;
        last = new.last().copied();
        let expected = server.tokenizer.decode(&new)?.escape_debug().to_string();
        ensure!(
            reply == &expected,
            "{question:?}: {reply:?}, expected {expected:?}"
        );
    }
    Ok(())
}
