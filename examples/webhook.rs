//! An HTTP service that is paid by webhook: each request with an `Idempotency-Key` takes effect
//! once, however often the sender repeats it.
//!
//! `cargo run --features tower --example webhook`: starts the service on the loopback, sends it
//! copies, a changed payload and a request that fails, and ends with 0 if all is as it should be,
//! else with 1. With `-- --serve` it goes on, for `curl`.
#![allow(clippy::print_stdout, reason = "an example talks")]

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use idemlog::{
    DedupLog, IdempotencyLayer, KeyParts, KeyState, Namespace, NamespaceOptions, NonRepeatable,
    Resolution, StoredResponse,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

type Fallible<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// What the service is about: money that must not be booked twice.
type Balance = Arc<AtomicU64>;

async fn pay(State(balance): State<Balance>, body: String) -> (StatusCode, String) {
    let Ok(amount) = body.trim().parse::<u64>() else {
        return (StatusCode::BAD_REQUEST, "an amount, please\n".to_owned());
    };
    let now = balance.fetch_add(amount, Ordering::SeqCst) + amount;
    if amount == 13 {
        // It was booked, and nobody can tell by the answer.
        return (StatusCode::INTERNAL_SERVER_ERROR, "bad luck\n".to_owned());
    }
    (StatusCode::CREATED, format!("balance {now}\n"))
}

fn app(space: Namespace<NonRepeatable>, balance: Balance) -> Router {
    // A real service takes the principal from its authentication, which stands in front.
    let layer = IdempotencyLayer::new(space, |parts| {
        let account = parts.headers.get("x-account")?;
        Some(account.to_str().ok()?.to_owned())
    });
    Router::new()
        .route("/pay", post(pay))
        .layer(layer)
        .with_state(balance)
}

/// Sends a payment and returns the whole response, its header names in lower case.
async fn send(port: u16, account: &str, key: &str, amount: &str) -> Fallible<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
    let request = format!(
        "POST /pay HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Account: {account}\r\n\
         Idempotency-Key: \"{key}\"\r\nContent-Length: {}\r\n\r\n{amount}",
        amount.len()
    );
    stream.write_all(request.as_bytes()).await?;
    let mut response = String::new();
    stream.read_to_string(&mut response).await?;
    Ok(response)
}

fn check(what: &str, response: &str, status: &str, contains: &str) -> Fallible<()> {
    println!("{what}: {}", response.lines().next().unwrap_or_default());
    if response.starts_with(&format!("HTTP/1.1 {status}")) && response.contains(contains) {
        return Ok(());
    }
    Err(format!("{what}: expected {status} and {contains:?}, got\n{response}").into())
}

async fn check_all(port: u16, space: &Namespace<NonRepeatable>, balance: &Balance) -> Fallible<()> {
    let first = send(port, "ann", "k1", "5").await?;
    check("first", &first, "201", "balance 5")?;
    for _ in 0..3 {
        let copy = send(port, "ann", "k1", "5").await?;
        check("copy", &copy, "201", "idempotency-replayed: true")?;
        if !copy.ends_with("balance 5\n") {
            return Err(format!("the copy got another response:\n{copy}").into());
        }
    }
    let changed = send(port, "ann", "k1", "6").await?;
    check("other payload", &changed, "422", "other-payload")?;
    let other = send(port, "bob", "k1", "6").await?;
    check("other account", &other, "201", "balance 11")?;
    let wrong = send(port, "ann", "k2", "much").await?;
    check("no amount", &wrong, "400", "an amount, please")?;

    // Nobody knows what became of this one: it is not booked again until somebody has looked.
    let failed = send(port, "ann", "k3", "13").await?;
    check("server error", &failed, "500", "bad luck")?;
    let doubt = send(port, "ann", "k3", "13").await?;
    check("in doubt", &doubt, "409", "in-doubt")?;
    let key = KeyParts::of(["ann", "k3"]);
    let KeyState::InDoubt(found) = space.get(&key)? else {
        return Err("the failed payment should be in doubt".into());
    };
    let applied = StoredResponse::new(201, "booked\n").header("content-type", "text/plain");
    let applied = Resolution::Applied(applied.into_bytes());
    if !space.resolve(&key, found.epoch, applied)?.is_applied() {
        return Err("the failed payment could not be resolved".into());
    }
    let resolved = send(port, "ann", "k3", "13").await?;
    check("resolved", &resolved, "201", "booked")?;

    match balance.load(Ordering::SeqCst) {
        24 => Ok(()),
        other => Err(format!("expected a balance of 24, found {other}").into()),
    }
}

async fn run(serves: bool) -> Fallible<()> {
    let log = DedupLog::in_memory()?;
    let space = log.namespace("payments", NamespaceOptions::new())?;
    let balance = Balance::default();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    println!(
        "curl -i http://127.0.0.1:{port}/pay -H 'X-Account: me' -H 'Idempotency-Key: \"k\"' -d 5"
    );
    let app = app(space.clone(), Arc::clone(&balance));
    if serves {
        axum::serve(listener, app).await?;
        return Ok(());
    }
    let server = tokio::spawn(async move { axum::serve(listener, app).await });
    check_all(port, &space, &balance).await?;
    server.abort();
    println!("every payment was booked once");
    Ok(())
}

fn main() -> ExitCode {
    let serves = std::env::args().any(|word| word == "--serve");
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build();
    let done = runtime
        .map_err(Into::into)
        .and_then(|runtime| runtime.block_on(run(serves)));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            println!("FAILED: {why}");
            ExitCode::FAILURE
        }
    }
}
