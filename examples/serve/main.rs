//! A small server: many conversations in one batch, within a byte budget.
//!
//! ```text
//! cargo run --release --example serve -- --model DIR --listen 127.0.0.1:7070 --budget 64MiB
//! cargo run --release --example serve -- --load 64 --seconds 300
//! ```
//!
//! A client sends a line, and receives the reply as a line. A connection is a conversation. One thread owns the decoder
//! and steps all conversations that wait for a reply together (`engine.rs`). The others are parked: a token costs its id.
//! With `--load`, clients in the same process come and go (`load.rs`), and every reply is compared with that of
//! the conversation alone.

#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "only loading is wanted here")]
mod common;
mod engine;
mod load;

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use clap::Parser;
use kv_direct::{pretrained::Pretrained, text::Tokenizer};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
};

use crate::engine::{Engine, Handle};

/// Many conversations in one batch.
#[derive(Parser)]
struct Args {
    /// A model folder; the built-in model if none is given.
    #[arg(long)]
    model: Option<PathBuf>,
    /// The address to listen on. Port 0 is any free port.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Bytes of all caches, in MiB.
    #[arg(long, default_value_t = 4.0)]
    budget: f64,
    /// Tokens of a reply, at most.
    #[arg(long, default_value_t = 24)]
    reply: usize,
    /// Runs so many clients, and ends.
    #[arg(long)]
    load: Option<usize>,
    /// How long the clients run.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
}

/// What all connections share.
pub(crate) struct Server {
    pub(crate) model: Arc<Pretrained>,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) engine: Handle,
    pub(crate) reply: usize,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let args = Args::parse();
    let (listener, server) = start(&args).await?;
    println!("listening on {}", listener.local_addr()?);
    let Some(clients) = args.load else {
        return accept(listener, server).await;
    };
    let address = listener.local_addr()?;
    tokio::spawn(accept(listener, Arc::clone(&server)));
    let seconds = Duration::from_secs(args.seconds);
    let report = load::run(&server, address, clients, seconds).await?;
    println!("{report}");
    Ok(())
}

async fn start(args: &Args) -> Result<(TcpListener, Arc<Server>)> {
    let dir = args.model.clone().unwrap_or(common::BUILT_IN.into());
    let model = Arc::new(common::load(&dir)?);
    let budget = (args.budget * f64::from(1 << 20)) as usize;
    let server = Server {
        tokenizer: Tokenizer::from_dir(&dir)?,
        engine: Engine::start(Arc::clone(&model), budget)?,
        reply: args.reply,
        model,
    };
    let listener = TcpListener::bind(args.listen).await?;
    Ok((listener, Arc::new(server)))
}

async fn accept(listener: TcpListener, server: Arc<Server>) -> Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        let server = Arc::clone(&server);
        tokio::spawn(async move {
            if let Err(error) = converse(stream, &server).await {
                eprintln!("a connection ended: {error:#}");
            }
        });
    }
}

/// One connection: a line in, a line out.
async fn converse(mut stream: TcpStream, server: &Server) -> Result<()> {
    let (read, mut write) = stream.split();
    let mut lines = BufReader::new(read).lines();
    let conversation = server.engine.open();
    while let Some(line) = lines.next_line().await? {
        let ids = server.tokenizer.encode_plain(&line)?;
        if ids.is_empty() {
            write.write_all(b"\n").await?;
            continue;
        }
        let reply = conversation.reply(ids, server.reply).await;
        let text = match reply {
            Ok(ids) => server.tokenizer.decode(&ids)?.escape_debug().to_string(),
            Err(error) => format!("error: {error:#}"),
        };
        let line = text + "\n";
        write
            .write_all(line.as_bytes())
            .await
            .context("the client left")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clients that come and go lose nothing, and the caches stay within their bytes.
    #[tokio::test]
    async fn a_short_load() {
        let args = Args::parse_from(["serve", "--budget", "1", "--reply", "12"]);
        let (listener, server) = start(&args).await.expect("it starts");
        let address = listener.local_addr().expect("it is bound");
        tokio::spawn(accept(listener, Arc::clone(&server)));
        let report = load::run(&server, address, 12, Duration::from_secs(3)).await;
        let report = report.expect("every reply is right");
        assert!(report.replies > 24, "{report}");
        assert!(report.most_bytes <= 1 << 20, "{report}");
        assert!(report.most_together > 1, "{report}");
    }
}
