//! The HTTP layer: each row of the table of answers, many copies at a time, and a server that is
//! killed between effect and answer.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::{Future, pending};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use ::tower::util::BoxCloneSyncService;
use ::tower::{Layer, ServiceExt, service_fn};
use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::BodyExt;
use idemlog::testing::ManualClock;
use idemlog::{
    Attempt, DedupLog, EffectClass, Error, ErrorKind, Failure, HttpBody, IdempotencyLayer,
    Internal, KeyParts, KeyState, Namespace, NamespaceOptions, NonRepeatable, Options, Probeable,
    Probed, Repeatable, Resolution, StoredResponse,
};
use tokio::sync::Notify;

type Service = BoxCloneSyncService<Request<HttpBody>, Response<Body>, Infallible>;

/// How often the service behind the layer was called.
#[derive(Clone, Default)]
struct Ran(Arc<AtomicU64>);

impl Ran {
    fn count(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    async fn wait_for(&self, count: u64) {
        while self.count() < count {
            tokio::task::yield_now().await;
        }
    }
}

/// A service that is told the number of its call.
fn service<F>(
    ran: &Ran,
    answer: impl Fn(u64, Request<HttpBody>) -> F + Clone + Send + Sync + 'static,
) -> Service
where
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let ran = ran.clone();
    BoxCloneSyncService::new(service_fn(move |request| {
        let call = ran.0.fetch_add(1, Ordering::SeqCst) + 1;
        let answer = answer(call, request);
        async move { Ok(answer.await) }
    }))
}

/// A service that answers this status, and its call's number.
fn numbered(ran: &Ran, status: u16) -> Service {
    service(ran, move |call, _| async move {
        respond(status, &format!("call {call}"))
    })
}

fn respond(status: u16, body: &str) -> Response<Body> {
    let mut response = Response::new(Body::from(body.to_owned()));
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    response
}

fn space<C: EffectClass>() -> Namespace<C> {
    let options = NamespaceOptions::new().settle(Duration::ZERO);
    let log = DedupLog::in_memory().unwrap();
    log.namespace(C::KIND.name(), options).unwrap()
}

fn layer<C: EffectClass>(space: &Namespace<C>) -> IdempotencyLayer<C> {
    IdempotencyLayer::new(space.clone(), |parts| {
        let name = parts.headers.get("principal")?.to_str().ok()?;
        Some(name.to_owned())
    })
}

/// The key of the header `k` that `ann` sends.
fn key() -> KeyParts {
    KeyParts::of(["ann", "k"])
}

fn post(key: &str, body: impl Into<Body>) -> Request<Body> {
    Request::post("/orders?shop=1")
        .header("Idempotency-Key", key)
        .header("principal", "ann")
        .body(body.into())
        .unwrap()
}

#[derive(Debug)]
struct Answer {
    status: u16,
    headers: HeaderMap,
    body: String,
}

impl Answer {
    fn is_replayed(&self) -> bool {
        self.header("idempotency-replayed") == Some("true")
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// Whether it is the layer's own answer of this status and code.
    fn is(&self, status: u16, code: &str) -> bool {
        self.status == status
            && self.header("content-type") == Some("application/problem+json")
            && self.body.contains(&format!(r#""code":"{code}""#))
            && !self.is_replayed()
    }

    fn retry_after(&self) -> u64 {
        self.header("retry-after").unwrap().parse().unwrap()
    }
}

async fn ask<C: EffectClass>(
    layer: &IdempotencyLayer<C>,
    service: &Service,
    request: Request<Body>,
) -> Answer {
    let response = layer.layer(service.clone()).oneshot(request).await;
    let (parts, body) = response.unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Answer {
        status: parts.status.as_u16(),
        headers: parts.headers,
        body: String::from_utf8(body.to_vec()).unwrap(),
    }
}

/// A body of unknown size.
struct Drip {
    frames: VecDeque<Result<Frame<Bytes>, std::io::Error>>,
    is_endless: bool,
    size: Option<u64>,
}

impl Drip {
    fn unsized_of(frames: Vec<Result<Frame<Bytes>, std::io::Error>>) -> Body {
        Drip::sized(frames, None)
    }

    fn sized(frames: Vec<Result<Frame<Bytes>, std::io::Error>>, size: Option<u64>) -> Body {
        Body::new(Drip {
            frames: frames.into(),
            is_endless: false,
            size,
        })
    }

    fn endless() -> Body {
        Body::new(Drip {
            frames: VecDeque::new(),
            is_endless: true,
            size: None,
        })
    }
}

impl http_body::Body for Drip {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        if self.is_endless {
            return Poll::Ready(Some(Ok(data("drip"))));
        }
        Poll::Ready(self.frames.pop_front())
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.size
            .map_or_else(Default::default, http_body::SizeHint::with_exact)
    }
}

fn data(text: &'static str) -> Frame<Bytes> {
    Frame::data(Bytes::from_static(text.as_bytes()))
}

fn broken() -> Result<Frame<Bytes>, std::io::Error> {
    Err(std::io::Error::other("cable cut"))
}

#[tokio::test]
async fn a_request_is_carried_out_once_and_its_copies_get_the_same_response() {
    let (space, ran) = (space::<NonRepeatable>(), Ran::default());
    let layer = layer(&space);
    let service = service(&ran, |call, request| async move {
        let body = request.into_body().collect().await.unwrap().to_bytes();
        let mut response = respond(201, &format!("call {call}: {body:?}"));
        let headers = response.headers_mut();
        headers.insert("location", HeaderValue::from_static("/orders/7"));
        headers.append("set-cookie", HeaderValue::from_static("session=1"));
        response
    });
    let first = ask(&layer, &service, post("k", "amount=5")).await;
    assert_eq!((first.status, first.is_replayed()), (201, false));
    assert_eq!(first.body, "call 1: b\"amount=5\"");
    assert_eq!(first.header("set-cookie"), Some("session=1"));
    for spelling in ["k", "\"k\""] {
        let copy = ask(&layer, &service, post(spelling, "amount=5")).await;
        assert_eq!((copy.status, copy.is_replayed()), (201, true));
        assert_eq!(copy.body, first.body);
        assert_eq!(copy.header("location"), Some("/orders/7"));
        assert_eq!(copy.header("set-cookie"), None);
    }
    assert_eq!(ran.count(), 1);

    let only_etag = layer.kept_headers([http::header::ETAG]);
    ask(&only_etag, &service, post("k2", "amount=5")).await;
    let copy = ask(&only_etag, &service, post("k2", "amount=5")).await;
    assert_eq!((copy.is_replayed(), copy.header("location")), (true, None));
}

#[tokio::test]
async fn a_missing_key_is_refused_where_one_is_required() {
    let (space, ran) = (space::<Internal>(), Ran::default());
    let service = numbered(&ran, 200);
    let without = || {
        let mut request = post("k", "");
        request.headers_mut().remove("idempotency-key");
        request
    };
    let answer = ask(&layer(&space), &service, without()).await;
    assert!(answer.is(400, "key-missing"), "{answer:?}");
    assert_eq!(ran.count(), 0);
    let optional = layer(&space).required(false);
    for call in 1..=2 {
        let answer = ask(&optional, &service, without()).await;
        assert_eq!(answer.body, format!("call {call}"));
    }
    let answer = ask(&optional, &service, post("k", "")).await;
    assert_eq!(
        (answer.body.as_str(), answer.is_replayed()),
        ("call 3", false)
    );
    assert!(ask(&optional, &service, post("k", "")).await.is_replayed());
}

#[tokio::test]
async fn methods_without_keys_pass_through() {
    let (space, ran) = (space::<Internal>(), Ran::default());
    let service = numbered(&ran, 200);
    let with = |method: Method| {
        let mut request = post("k", "");
        *request.method_mut() = method;
        request
    };
    for (method, calls) in [
        (Method::GET, [1, 2]),
        (Method::HEAD, [3, 4]),
        (Method::PUT, [5, 6]),
        (Method::DELETE, [7, 8]),
        (Method::PATCH, [9, 9]),
    ] {
        for call in calls {
            let answer = ask(&layer(&space), &service, with(method.clone())).await;
            assert_eq!(answer.body, format!("call {call}"), "{method}");
        }
    }
    let puts = layer(&self::space::<Internal>()).methods([Method::PUT]);
    for call in [10, 10] {
        let answer = ask(&puts, &service, with(Method::PUT)).await;
        assert_eq!(answer.body, format!("call {call}"));
    }
    assert_eq!(
        ask(&puts, &service, with(Method::POST)).await.body,
        "call 11"
    );
}

#[tokio::test]
async fn keys_that_are_none_are_refused() {
    let (space, ran) = (space::<Repeatable>(), Ran::default());
    let service = numbered(&ran, 200);
    let layer = layer(&space).key_bytes_max(20);
    for wrong in [
        "",
        "\"\"",
        "a b",
        "a,b",
        "\"a",
        "\"a\"b",
        "123456789012345678901",
    ] {
        let answer = ask(&layer, &service, post(wrong, "")).await;
        assert!(answer.is(400, "key-malformed"), "{wrong}: {answer:?}");
    }
    let mut twice = post("k", "");
    let copy = HeaderValue::from_static("k");
    twice.headers_mut().append("idempotency-key", copy);
    let answer = ask(&layer, &service, twice).await;
    assert!(answer.is(400, "key-malformed"), "{answer:?}");
    assert_eq!(ran.count(), 0);
    let longest = ask(&layer, &service, post("12345678901234567890", "")).await;
    assert_eq!(longest.status, 200);
}

#[tokio::test]
async fn a_copy_is_told_to_come_back_while_the_request_is_carried_out() {
    let (space, ran, finish) = (
        space::<NonRepeatable>(),
        Ran::default(),
        Arc::new(Notify::new()),
    );
    let layer = layer(&space);
    let finished = Arc::clone(&finish);
    let service = service(&ran, move |call, _| {
        let finished = Arc::clone(&finished);
        async move {
            finished.notified().await;
            respond(200, &format!("call {call}"))
        }
    });
    let spawn = |layer: IdempotencyLayer<NonRepeatable>| {
        let service = service.clone();
        tokio::spawn(async move { ask(&layer, &service, post("k", "")).await })
    };
    let first = spawn(layer.clone());
    ran.wait_for(1).await;
    let copy = ask(&layer, &service, post("k", "")).await;
    assert!(copy.is(409, "in-flight"), "{copy:?}");
    assert!((1..=60).contains(&copy.retry_after()), "{copy:?}");
    let other = ask(&layer, &service, post("k", "other")).await;
    assert!(other.is(422, "other-payload"), "{other:?}");
    let impatient = layer.clone().wait(Duration::from_millis(1));
    let copy = ask(&impatient, &service, post("k", "")).await;
    assert!(copy.is(409, "in-flight"), "{copy:?}");

    let waiting = spawn(layer.wait(Duration::from_secs(60)));
    finish.notify_one();
    assert_eq!(first.await.unwrap().body, "call 1");
    let waited = waiting.await.unwrap();
    assert_eq!(
        (waited.body.as_str(), waited.is_replayed()),
        ("call 1", true)
    );
    assert_eq!(ran.count(), 1);
}

#[tokio::test]
async fn another_payload_under_the_same_key_is_refused() {
    let (space, ran) = (space::<Repeatable>(), Ran::default());
    let (layer, service) = (layer(&space), numbered(&ran, 200));
    ask(&layer, &service, post("k", "amount=5")).await;
    let changes: [fn(&mut Request<Body>); 4] = [
        |request| *request.body_mut() = Body::from("amount=6"),
        |request| *request.method_mut() = Method::PATCH,
        |request| *request.uri_mut() = "/refunds?shop=1".parse().unwrap(),
        |request| *request.uri_mut() = "/orders?shop=2".parse().unwrap(),
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let mut request = post("k", "amount=5");
        change(&mut request);
        let answer = ask(&layer, &service, request).await;
        assert!(answer.is(422, "other-payload"), "{index}: {answer:?}");
    }
    // The same bytes in other pieces are the same payload.
    let pieces = Drip::unsized_of(vec![Ok(data("amount")), Ok(data("=5"))]);
    assert!(ask(&layer, &service, post("k", pieces)).await.is_replayed());
    assert_eq!(ran.count(), 1);
}

#[tokio::test]
async fn two_principals_share_no_key() {
    let (space, ran) = (space::<Repeatable>(), Ran::default());
    let (layer, service) = (layer(&space), numbered(&ran, 200));
    let of = |principal: &str, key: &str| {
        let mut request = post(key, "");
        let principal = principal.parse().unwrap();
        request.headers_mut().insert("principal", principal);
        request
    };
    for (index, (principal, key)) in [("ann", "k"), ("bob", "k"), ("an", "nk"), ("", "annk")]
        .into_iter()
        .enumerate()
    {
        let answer = ask(&layer, &service, of(principal, key)).await;
        assert_eq!(answer.body, format!("call {}", index + 1));
    }
    let shared = IdempotencyLayer::shared(space);
    for (principal, is_replayed) in [("ann", false), ("bob", true)] {
        let answer = ask(&shared, &service, of(principal, "annk")).await;
        assert_eq!(answer.body, "call 5");
        assert_eq!(answer.is_replayed(), is_replayed);
    }
    let mut nobody = post("k", "");
    nobody.headers_mut().remove("principal");
    let answer = ask(&layer, &service, nobody).await;
    assert!(answer.is(400, "principal-missing"), "{answer:?}");
    assert_eq!(ran.count(), 5);
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_before_anything_is_claimed() {
    let (space, ran) = (space::<NonRepeatable>(), Ran::default());
    let (layer, service) = (layer(&space).body_bytes_max(8), numbered(&ran, 200));
    let pieces = vec![Ok(data("12345")), Ok(data("6789"))];
    for body in [
        Body::from("123456789"),
        Drip::unsized_of(pieces),
        Drip::endless(),
    ] {
        let answer = ask(&layer, &service, post("k", body)).await;
        assert!(answer.is(413, "body-too-large"), "{answer:?}");
    }
    let half = Drip::unsized_of(vec![Ok(data("1")), broken()]);
    let answer = ask(&layer, &service, post("k", half)).await;
    assert!(answer.is(400, "body-broken"), "{answer:?}");
    assert_eq!(space.get(key()).unwrap(), KeyState::Absent);
    assert_eq!(ran.count(), 0);
    assert_eq!(
        ask(&layer, &service, post("k", "12345678")).await.status,
        200
    );
}

#[tokio::test]
async fn a_response_that_is_not_kept_passes_through_and_its_copies_learn_its_status() {
    let log = DedupLog::in_memory().unwrap();
    let options = NamespaceOptions::new().outcome_bytes_max(40);
    let space: Namespace<NonRepeatable> = log.namespace("jobs", options).unwrap();
    let (layer, ran) = (layer(&space), Ran::default());
    let bodies: [fn() -> Body; 3] = [
        || Body::from("x".repeat(41)),
        || Drip::unsized_of(vec![Ok(data("a")), Ok(data("b"))]),
        || {
            let trailers = HeaderMap::from_iter([(http::header::ETAG, "t".parse().unwrap())]);
            let frames = vec![Ok(data("ab")), Ok(Frame::trailers(trailers))];
            Drip::sized(frames, Some(2))
        },
    ];
    for (index, body) in bodies.into_iter().enumerate() {
        let service = service(&ran, move |_, _| async move {
            let mut response = Response::new(body());
            *response.status_mut() = StatusCode::ACCEPTED;
            response
        });
        let key = format!("k{index}");
        let first = ask(&layer, &service, post(&key, "")).await;
        assert_eq!(first.status, 202);
        let body = body().collect().await.unwrap().to_bytes();
        assert_eq!(first.body.as_bytes(), body);
        let copy = ask(&layer, &service, post(&key, "")).await;
        assert!(copy.is(409, "answer-not-kept"), "{copy:?}");
        assert!(copy.body.contains(r#""original_status":202"#), "{copy:?}");
    }
    assert_eq!(ran.count(), 3);
    // What just fits is kept.
    let fits = service(&ran, |_, _| async { respond(200, &"x".repeat(32)) });
    for is_replayed in [false, true] {
        let answer = ask(&layer, &fits, post("fits", "")).await;
        assert_eq!((answer.status, answer.is_replayed()), (200, is_replayed));
        assert_eq!(answer.body.len(), 32);
    }
    let breaks = service(&ran, |_, _| async {
        Response::new(Drip::sized(vec![Ok(data("a")), broken()], Some(2)))
    });
    let first = ask(&layer, &breaks, post("breaks", "")).await;
    assert!(first.is(500, "answer-broken"), "{first:?}");
    let copy = ask(&layer, &breaks, post("breaks", "")).await;
    assert!(copy.is(409, "answer-not-kept"), "{copy:?}");
    assert_eq!(ran.count(), 5);

    let nothing = NamespaceOptions::new().outcome_bytes_max(0);
    let space: Namespace<Repeatable> = log.namespace("nothing", nothing).unwrap();
    let layer = self::layer(&space);
    assert_eq!(ask(&layer, &fits, post("k", "")).await.status, 200);
    let copy = ask(&layer, &fits, post("k", "")).await;
    assert!(copy.is(409, "answer-not-kept"), "{copy:?}");
    assert!(!copy.body.contains("original_status"), "{copy:?}");
}

#[tokio::test]
async fn a_client_error_is_an_answer_like_any_other() {
    let (space, ran) = (space::<NonRepeatable>(), Ran::default());
    let (layer, service) = (layer(&space), numbered(&ran, 404));
    for is_replayed in [false, true] {
        let answer = ask(&layer, &service, post("k", "")).await;
        assert_eq!((answer.status, answer.is_replayed()), (404, is_replayed));
        assert_eq!(answer.body, "call 1");
    }
}

#[tokio::test]
async fn a_server_error_is_unknown_and_the_class_says_what_follows() {
    // May run again: it does, under the same derived key.
    let (repeatable, ran) = (space::<Repeatable>(), Ran::default());
    let service = service(&ran, |call, request| async move {
        let attempt = request.extensions().get::<Attempt>().unwrap();
        let text = format!("{} {}", attempt.attempt(), attempt.derived_key("pay"));
        respond(if call == 1 { 503 } else { 200 }, &text)
    });
    let first = ask(&layer(&repeatable), &service, post("k", "")).await;
    assert_eq!((first.status, &first.body[..2]), (503, "1 "));
    let second = ask(&layer(&repeatable), &service, post("k", "")).await;
    assert_eq!((second.status, &second.body[..2]), (200, "2 "));
    assert_eq!(first.body[2..], second.body[2..]);

    // May not: in doubt, until somebody has found out.
    let (careful, ran) = (space::<NonRepeatable>(), Ran::default());
    let (layer, service) = (self::layer(&careful), numbered(&ran, 500));
    assert_eq!(ask(&layer, &service, post("k", "")).await.body, "call 1");
    let doubt = ask(&layer, &service, post("k", "")).await;
    assert!(doubt.is(409, "in-doubt"), "{doubt:?}");
    assert_eq!((ran.count(), doubt.header("retry-after")), (1, None));
    let KeyState::InDoubt(doubt) = careful.get(key()).unwrap() else {
        panic!("not in doubt")
    };
    assert_eq!(doubt.evidence, b"POST /orders\nthe service answered 500");
    let found = StoredResponse::new(201, "paid").header("location", "/orders/9");
    let found = Resolution::Applied(found.into_bytes());
    assert!(
        careful
            .resolve(key(), doubt.epoch, found)
            .unwrap()
            .is_applied()
    );
    let copy = ask(&layer, &service, post("k", "")).await;
    assert_eq!((copy.status, copy.is_replayed()), (201, true));
    assert_eq!(
        (copy.body.as_str(), copy.header("location")),
        ("paid", Some("/orders/9"))
    );
    assert_eq!(ran.count(), 1);

    // The target can be asked.
    let ran = Ran::default();
    let probed = space::<Probeable>()
        .with_probe(|_| Probed::Applied(StoredResponse::new(200, "it happened").into_bytes()));
    let (layer, service) = (self::layer(&probed), numbered(&ran, 500));
    assert_eq!(ask(&layer, &service, post("k", "")).await.body, "call 1");
    let copy = ask(&layer, &service, post("k", "")).await;
    assert_eq!(
        (copy.body.as_str(), copy.is_replayed()),
        ("it happened", true)
    );
    assert_eq!(ran.count(), 1);
}

#[tokio::test]
async fn what_was_resolved_with_other_bytes_is_done_all_the_same() {
    let (space, ran) = (space::<NonRepeatable>(), Ran::default());
    let (layer, service) = (layer(&space), numbered(&ran, 500));
    ask(&layer, &service, post("k", "")).await;
    let KeyState::InDoubt(doubt) = space.get(key()).unwrap() else {
        panic!("not in doubt")
    };
    let by_hand = Resolution::Applied(b"receipt 7".to_vec());
    assert!(
        space
            .resolve(key(), doubt.epoch, by_hand)
            .unwrap()
            .is_applied()
    );
    let copy = ask(&layer, &service, post("k", "")).await;
    assert!(copy.is(409, "answer-not-kept"), "{copy:?}");
    assert_eq!(ran.count(), 1);
}

#[tokio::test]
async fn a_client_that_goes_away_and_a_panic_leave_the_outcome_unknown() {
    let (space, ran) = (space::<NonRepeatable>(), Ran::default());
    let layer = layer(&space);
    let hangs = service(&ran, |_, _| pending());
    let panics = service(&ran, |call, _| async move {
        assert!(call == 0, "the service panics");
        respond(200, "")
    });
    for (key, service, calls) in [("gone", hangs, 1), ("panic", panics, 2)] {
        let (task_layer, task_service) = (layer.clone(), service.clone());
        let request = post(key, "");
        let task = tokio::spawn(async move { ask(&task_layer, &task_service, request).await });
        ran.wait_for(calls).await;
        task.abort();
        assert!(task.await.is_err());
        let copy = ask(&layer, &service, post(key, "")).await;
        assert!(copy.is(409, "in-doubt"), "{key}: {copy:?}");
        assert_eq!(ran.count(), calls);
    }
    // Before the service was called nothing has happened.
    let dropped = layer.layer(numbered(&ran, 200)).oneshot(post("early", ""));
    drop(dropped);
    assert_eq!(
        space.get(KeyParts::of(["ann", "early"])).unwrap(),
        KeyState::Absent
    );
}

#[tokio::test]
async fn an_error_of_the_service_is_passed_on_and_leaves_the_outcome_unknown() {
    let space = space::<NonRepeatable>();
    let fails = service_fn(|_: Request<HttpBody>| async {
        Err::<Response<Body>, _>(std::io::Error::other("no answer"))
    });
    let failed = layer(&space).layer(fails).oneshot(post("k", "")).await;
    assert_eq!(failed.unwrap_err().to_string(), "no answer");
    let KeyState::InDoubt(doubt) = space.get(key()).unwrap() else {
        panic!("not in doubt")
    };
    assert_eq!(doubt.evidence, b"POST /orders\nthe service failed");
}

#[tokio::test]
async fn the_service_can_say_how_it_failed() {
    let (space, ran) = (space::<NonRepeatable>(), Ran::default());
    let layer = layer(&space);
    let failing = |failure: Failure| {
        service(&ran, move |_, _| {
            let failure = failure.clone();
            async move {
                let mut response = respond(500, "the service's own words");
                response.extensions_mut().insert(failure);
                response
            }
        })
    };
    let cases = [
        (
            Failure::retryable(Duration::from_secs(90), "e"),
            Some((503, "backoff")),
        ),
        (Failure::permanent("e"), Some((409, "rejected"))),
        (Failure::Release, None),
    ];
    for (index, (failure, told)) in cases.into_iter().enumerate() {
        let (key, service) = (format!("k{index}"), failing(failure));
        let first = ask(&layer, &service, post(&key, "")).await;
        assert_eq!(first.body, "the service's own words");
        let before = ran.count();
        let copy = ask(&layer, &service, post(&key, "")).await;
        match told {
            Some((status, code)) => assert!(copy.is(status, code), "{copy:?}"),
            None => assert_eq!(copy.body, "the service's own words"),
        }
        assert_eq!(ran.count() - before, u64::from(told.is_none()));
        if index == 0 {
            assert_eq!(copy.retry_after(), 90);
        }
    }
}

#[tokio::test]
async fn a_request_that_used_up_its_attempts_is_dead() {
    let log = DedupLog::in_memory().unwrap();
    let options = NamespaceOptions::new().attempts_max(2);
    let space: Namespace<Repeatable> = log.namespace("jobs", options).unwrap();
    let (layer, ran) = (layer(&space), Ran::default());
    let service = numbered(&ran, 500);
    for call in 1..=2 {
        let answer = ask(&layer, &service, post("k", "")).await;
        assert_eq!(answer.body, format!("call {call}"));
    }
    let dead = ask(&layer, &service, post("k", "")).await;
    assert!(dead.is(409, "dead"), "{dead:?}");
    assert_eq!(ran.count(), 2);
}

/// A request outlives its lease, and a copy takes over: what the copy recorded is the answer.
#[tokio::test]
async fn a_request_whose_claim_was_lost_is_answered_what_others_recorded() {
    let clock = Arc::new(ManualClock::new(1_700_000_000_000));
    let disk = idemlog::testing::sim::SimDisk::new();
    let options = Options::new().clock(Arc::clone(&clock) as _);
    let log = options.open_on(disk.dir()).unwrap();
    let lease = Duration::from_secs(10);
    let options = NamespaceOptions::new().lease(lease);
    let space: Namespace<Repeatable> = log.namespace("jobs", options).unwrap();
    let ran = Ran::default();
    let (slow_layer, quick) = (layer(&space), numbered(&Ran::default(), 201));
    let slow = service(&ran, move |_, _| {
        let (clock, layer, quick) = (Arc::clone(&clock), slow_layer.clone(), quick.clone());
        async move {
            clock.advance_ms(11_000);
            let copy = ask(&layer, &quick, post("k", "")).await;
            assert_eq!((copy.status, copy.is_replayed()), (201, false));
            respond(200, "too late")
        }
    });
    let first = ask(&layer(&space), &slow, post("k", "")).await;
    assert_eq!((first.status, first.is_replayed()), (201, true));
    assert_eq!((first.body.as_str(), ran.count()), ("call 1", 1));
}

#[tokio::test]
async fn a_store_that_cannot_answer_is_said_so() {
    let log = DedupLog::in_memory().unwrap();
    let space: Namespace<Repeatable> = log.namespace("jobs", NamespaceOptions::new()).unwrap();
    let (layer, ran) = (layer(&space), Ran::default());
    let service = numbered(&ran, 200);
    log.close().unwrap();
    let answer = ask(&layer, &service, post("k", "")).await;
    assert!(answer.is(503, "store-failed"), "{answer:?}");
    let response = layer.layer(service).oneshot(post("k", "")).await.unwrap();
    let error = response.extensions().get::<Arc<Error>>().unwrap();
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert_eq!(ran.count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_a_hundred_copies_at_a_time_one_takes_effect() {
    for waits in [false, true] {
        let (space, ran) = (space::<NonRepeatable>(), Ran::default());
        let mut layer = layer(&space);
        if waits {
            layer = layer.wait(Duration::from_secs(60));
        }
        let service = service(&ran, |call, _| async move {
            tokio::task::yield_now().await;
            respond(201, &format!("call {call}"))
        });
        let tasks: Vec<_> = (0..100)
            .map(|_| {
                let (layer, service) = (layer.clone(), service.clone());
                tokio::spawn(async move { ask(&layer, &service, post("k", "")).await })
            })
            .collect();
        let (mut own, mut replayed, mut busy) = (0, 0, 0);
        for task in tasks {
            let answer = task.await.unwrap();
            match answer.status {
                201 if answer.is_replayed() => replayed += 1,
                201 => own += 1,
                _ => busy += u32::from(answer.is(409, "in-flight")),
            }
            assert!(
                answer.status == 409 || answer.body == "call 1",
                "{answer:?}"
            );
        }
        assert_eq!((own, own + replayed + busy, ran.count()), (1, 100, 1));
        assert!(!waits || busy == 0, "{busy} were not waited for");
    }
}

/// A lease is how long an owner that hangs is waited for, and may be long; a client is not told to
/// stay away for so long.
#[tokio::test]
async fn a_long_lease_does_not_send_clients_away_for_as_long() {
    let day = Duration::from_secs(86_400);
    let log = DedupLog::in_memory().unwrap();
    for (index, (lease, max, told)) in [
        (day, None, 60),
        (day, Some(Duration::from_secs(5)), 5),
        (day, Some(Duration::from_millis(1500)), 2),
        (day, Some(Duration::ZERO), 1),
        (day, Some(day * 2), 86_400),
        (Duration::from_millis(900), Some(day), 1),
    ]
    .into_iter()
    .enumerate()
    {
        let options = NamespaceOptions::new().lease(lease);
        let space: Namespace<Internal> = log.namespace(&format!("n{index}"), options).unwrap();
        let mut layer = layer(&space);
        if let Some(max) = max {
            layer = layer.retry_after_max(max);
        }
        let ran = Ran::default();
        let hangs = service(&ran, |_, _| pending());
        let first = layer.layer(hangs.clone());
        let first = tokio::spawn(first.oneshot(post("k", "")));
        ran.wait_for(1).await;
        let copy = ask(&layer, &hangs, post("k", "")).await;
        assert!(copy.is(409, "in-flight"), "{copy:?}");
        assert_eq!(copy.retry_after(), told, "{lease:?} {max:?}");
        first.abort();
    }
}

/// Tells when it is dropped.
struct Gone(Arc<Notify>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

/// A client of a real server sends its request and closes its socket while the service works on
/// it. Returns what the same request is answered later, and the derived keys of the calls. With
/// `outlives` each request runs as a task of its own, as `docs/http.md` says.
async fn hang_up<C: EffectClass>(space: &Namespace<C>, outlives: bool) -> (String, Vec<String>) {
    let (entered, finish, gone) = <(Arc<Notify>, Arc<Notify>, Arc<Notify>)>::default();
    let calls = Arc::new(std::sync::Mutex::new(Vec::new()));
    let handler = {
        let (entered, finish, calls) = (entered.clone(), finish.clone(), calls.clone());
        move |attempt: axum::Extension<Attempt>| async move {
            let call = {
                let mut calls = calls.lock().unwrap();
                calls.push(attempt.derived_key("pay"));
                calls.len()
            };
            if call == 1 {
                entered.notify_one();
                finish.notified().await;
            }
            (StatusCode::CREATED, format!("call {call}"))
        }
    };
    let route = axum::routing::post(handler);
    let mut app = axum::Router::new().route("/orders", route);
    app = app.layer(layer(space));
    if outlives {
        app = app.layer(axum::middleware::from_fn(
            |request: axum::extract::Request, next: axum::middleware::Next| async move {
                tokio::spawn(next.run(request)).await.unwrap()
            },
        ));
    }
    let told = gone.clone();
    app = app.layer(axum::middleware::from_fn(
        move |request: axum::extract::Request, next: axum::middleware::Next| {
            let gone = Gone(told.clone());
            async move {
                let _gone = gone;
                next.run(request).await
            }
        },
    ));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = tokio::spawn(async move { axum::serve(listener, app).await });

    let client = send(port);
    entered.notified().await;
    drop(client);
    // The server has noticed, and what it has dropped is recorded.
    gone.notified().await;
    finish.notify_one();
    if outlives {
        while !matches!(space.get(key()).unwrap(), KeyState::Done(_)) {
            tokio::task::yield_now().await;
        }
    }
    let answer = tokio::task::spawn_blocking(move || whole(send(port)));
    let answer = answer.await.unwrap();
    server.abort();
    let calls = calls.lock().unwrap().clone();
    (answer, calls)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_hangs_up_while_the_service_works_leaves_what_its_class_says() {
    let (answer, calls) = hang_up(&space::<NonRepeatable>(), false).await;
    assert!(answer.starts_with("http/1.1 409"), "{answer}");
    assert!(answer.contains(r#""code":"in-doubt""#), "{answer}");
    assert_eq!(calls.len(), 1);

    let asked = StoredResponse::new(201, "asked").into_bytes();
    let space_asked = space::<Probeable>().with_probe(move |_| Probed::Applied(asked.clone()));
    let (answer, calls) = hang_up(&space_asked, false).await;
    assert!(answer.starts_with("http/1.1 201"), "{answer}");
    assert!(answer.contains("idempotency-replayed: true"), "{answer}");
    assert!(answer.ends_with("asked"), "{answer}");
    assert_eq!(calls.len(), 1);

    for (answer, calls) in [
        hang_up(&space::<Repeatable>(), false).await,
        hang_up(&space::<Internal>(), false).await,
    ] {
        assert!(answer.starts_with("http/1.1 201"), "{answer}");
        assert!(!answer.contains("idempotency-replayed"), "{answer}");
        assert!(answer.ends_with("call 2"), "{answer}");
        assert_eq!(calls.len(), 2);
        assert_eq!(calls[0], calls[1]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_is_a_task_of_its_own_outlives_its_client() {
    for (answer, calls) in [
        hang_up(&space::<NonRepeatable>(), true).await,
        hang_up(&space::<Internal>(), true).await,
    ] {
        assert!(answer.starts_with("http/1.1 201"), "{answer}");
        assert!(answer.contains("idempotency-replayed: true"), "{answer}");
        assert!(answer.ends_with("call 1"), "{answer}");
        assert_eq!(calls.len(), 1);
    }
}

/// Sends the request of `key` to a server on this machine.
fn send(port: u16) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let request = "POST /orders HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
                   Idempotency-Key: \"k\"\r\nPrincipal: ann\r\n\
                   Content-Length: 8\r\n\r\namount=5";
    stream.write_all(request.as_bytes()).unwrap();
    stream
}

/// Returns the whole response, in lower case.
fn whole(mut stream: TcpStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text.to_lowercase()
}

const TASK: &str = "IDEMLOG_TEST_TOWER_TASK";

/// Not a test of its own: the server that is killed.
#[test]
fn child() {
    let Ok(task) = std::env::var(TASK) else {
        return;
    };
    let words: Vec<&str> = task.splitn(3, ' ').collect();
    let [class, hang, dir] = words.as_slice() else {
        panic!("{task}")
    };
    let dir = Path::new(dir);
    let options = Options::new().lock_timeout(Duration::from_secs(20));
    let log = options.open(dir.join("store")).unwrap();
    let options = NamespaceOptions::new().settle(Duration::ZERO);
    match *class {
        "repeatable" => serve::<Repeatable>(log.namespace("jobs", options).unwrap(), hang, dir),
        "non-repeatable" => {
            serve::<NonRepeatable>(log.namespace("jobs", options).unwrap(), hang, dir)
        }
        "internal" => serve::<Internal>(log.namespace("jobs", options).unwrap(), hang, dir),
        "probeable" => {
            let space: Namespace<Probeable> = log.namespace("jobs", options).unwrap();
            let effects = dir.join("effects");
            let space = space.with_probe(move |request| {
                let done = std::fs::read_to_string(&effects).unwrap_or_default();
                let derived = request.derived_key("pay");
                match done.lines().any(|line| line == derived) {
                    true => Probed::Applied(StoredResponse::new(201, "asked").into_bytes()),
                    false => Probed::NotApplied,
                }
            });
            serve(space, hang, dir);
        }
        _ => panic!("{task}"),
    }
}

/// Serves until it is killed. The effect is a line in a file, which names the derived key.
fn serve<C: EffectClass>(space: Namespace<C>, hang: &str, dir: &Path) {
    let effects = dir.join("effects");
    let (hangs_before, hangs_after) = (hang == "effect", hang == "commit");
    let app = axum::Router::new().route(
        "/orders",
        axum::routing::post(move |attempt: axum::Extension<Attempt>| {
            let effects = effects.clone();
            async move {
                let mut options = std::fs::OpenOptions::new();
                let mut file = options.append(true).create(true).open(&effects).unwrap();
                writeln!(file, "{}", attempt.derived_key("pay")).unwrap();
                if hangs_before {
                    say("stopped");
                    pending::<()>().await;
                }
                (
                    StatusCode::CREATED,
                    format!("attempt {}", attempt.attempt()),
                )
            }
        }),
    );
    let app = app.layer(layer(&space));
    // Outside of the layer: the response is recorded and does not reach the client.
    let stop = axum::middleware::map_response(move |response: Response<Body>| async move {
        if hangs_after {
            say("stopped");
            pending::<()>().await;
        }
        response
    });
    let app = app.layer(stop);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        say(&format!("port {}", listener.local_addr().unwrap().port()));
        axum::serve(listener, app).await.unwrap();
    });
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // The test harness leaves an unfinished line behind.
    write!(out, "\n{line}\n").unwrap();
    out.flush().unwrap();
}

struct Server {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
    port: u16,
}

impl Server {
    fn start(class: &str, hang: &str, dir: &Path) -> Server {
        let name = concat!(module_path!(), "::child")
            .split_once("::")
            .unwrap()
            .1;
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([name, "--exact", "--nocapture", "--test-threads=1"])
            .env(TASK, format!("{class} {hang} {}", dir.display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let mut server = Server {
            child,
            lines,
            port: 0,
        };
        server.port = server.wait_for("port ").parse().unwrap();
        server
    }

    /// Waits for a line that begins like this, and returns what follows.
    fn wait_for(&mut self, start: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(
                self.lines.read_line(&mut line).unwrap() > 0,
                "the server ended by itself"
            );
            if let Some(rest) = line.trim_end().strip_prefix(start) {
                return rest.to_owned();
            }
        }
    }

    fn send(&self) -> TcpStream {
        send(self.port)
    }

    fn answer(&self) -> String {
        whole(self.send())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Kills a server of this class at this point, restarts it, sends the request again, twice, and
/// returns what that was answered and the effects there were.
fn kill_and_retry(class: &str, hang: &str) -> (String, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let effects: PathBuf = dir.path().join("effects");
    let mut server = Server::start(class, hang, dir.path());
    let client = server.send();
    server.wait_for("stopped");
    drop(server);
    drop(client);
    let done = std::fs::read_to_string(&effects).unwrap();
    assert_eq!(done.lines().count(), 1);

    let server = Server::start(class, "never", dir.path());
    let (first, second) = (server.answer(), server.answer());
    let status = |answer: &str| answer[..12].to_owned();
    assert_eq!(status(&first), status(&second), "{first}\n{second}");
    drop(server);
    let done = std::fs::read_to_string(&effects).unwrap();
    (first, done.lines().map(str::to_owned).collect())
}

#[test]
fn a_server_killed_between_effect_and_commit_leaves_what_its_class_says() {
    let (answer, effects) = kill_and_retry("non-repeatable", "effect");
    assert!(answer.starts_with("http/1.1 409"), "{answer}");
    assert!(answer.contains(r#""code":"in-doubt""#), "{answer}");
    assert_eq!(effects.len(), 1);

    let (answer, effects) = kill_and_retry("probeable", "effect");
    assert!(answer.starts_with("http/1.1 201"), "{answer}");
    assert!(answer.contains("idempotency-replayed: true"), "{answer}");
    assert!(answer.ends_with("asked"), "{answer}");
    assert_eq!(effects.len(), 1);

    // Its target knows the derived key, and so takes the second for a copy of the first.
    for class in ["repeatable", "internal"] {
        let (answer, effects) = kill_and_retry(class, "effect");
        assert!(answer.starts_with("http/1.1 201"), "{class}: {answer}");
        // Its claim waited for no disk, so the attempt may be forgotten.
        assert!(answer.contains("\r\n\r\nattempt "), "{class}: {answer}");
        assert!(
            !answer.contains("idempotency-replayed"),
            "{class}: {answer}"
        );
        assert_eq!(effects.len(), 2, "{class}");
        assert_eq!(effects[0], effects[1], "{class}");
    }
}

#[test]
fn a_server_killed_between_commit_and_answer_answers_the_copy_from_its_store() {
    for class in ["repeatable", "probeable", "non-repeatable", "internal"] {
        let (answer, effects) = kill_and_retry(class, "commit");
        assert!(answer.starts_with("http/1.1 201"), "{class}: {answer}");
        assert!(
            answer.contains("idempotency-replayed: true"),
            "{class}: {answer}"
        );
        assert!(answer.ends_with("attempt 1"), "{class}: {answer}");
        assert_eq!(effects.len(), 1, "{class}");
    }
}
