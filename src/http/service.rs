//! How does one request go through the layer?

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use ::http::request::Parts;
use ::http::{Request, Response};
use bytes::Bytes;
use http_body::Body;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use sha2::{Digest as _, Sha256};
use tower_service::Service;

use super::body::{BoxError, HttpBody};
use super::key_header::{NoKey, key_of};
use super::stored::StoredResponse;
use super::{Settings, answer};
use crate::engine::claim::{Commit, StartError, Started};
use crate::engine::class::EffectClass;
use crate::engine::namespace::Namespace;
use crate::engine::run_once::Attempt;
use crate::error::Result;
use crate::key::{EVIDENCE_BYTES_MAX, Fingerprint};
use crate::key_parts::KeyParts;
use crate::verdict::{Change, Failure};

/// A service behind an [`IdempotencyLayer`](crate::IdempotencyLayer).
pub struct Idempotency<S, C> {
    inner: S,
    desk: Desk<C>,
}

/// All of the layer but the service behind it.
struct Desk<C> {
    namespace: Namespace<C>,
    settings: Arc<Settings>,
}

impl<S, C> Idempotency<S, C> {
    pub(super) fn new(inner: S, namespace: Namespace<C>, settings: Arc<Settings>) -> Self {
        let desk = Desk {
            namespace,
            settings,
        };
        Idempotency { inner, desk }
    }
}

impl<S: Clone, C> Clone for Idempotency<S, C> {
    fn clone(&self) -> Self {
        let Desk {
            namespace,
            settings,
        } = &self.desk;
        Idempotency::new(self.inner.clone(), namespace.clone(), Arc::clone(settings))
    }
}

impl<S: fmt::Debug, C> fmt::Debug for Idempotency<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency")
            .field("inner", &self.inner)
            .field("namespace", &self.desk.namespace)
            .finish_non_exhaustive()
    }
}

impl<S, C, ReqB, ResB> Service<Request<ReqB>> for Idempotency<S, C>
where
    S: Service<Request<HttpBody>, Response = Response<ResB>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    C: EffectClass,
    ReqB: Body<Data = Bytes> + Send + 'static,
    ReqB::Error: Into<BoxError>,
    ResB: Body<Data = Bytes> + Send + 'static,
    ResB::Error: Into<BoxError>,
{
    type Response = Response<HttpBody>;
    type Error = S::Error;
    type Future =
        Pin<Box<dyn Future<Output = std::result::Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<std::result::Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<ReqB>) -> Self::Future {
        // The one that is ready is used; its copy is asked next.
        let copy = self.clone();
        let ready = std::mem::replace(self, copy);
        Box::pin(ready.answer(request))
    }
}

/// What a request is claimed with.
struct Keyed {
    key: KeyParts,
    fingerprint: Fingerprint,
    /// For whoever has to find out what became of the request.
    evidence: Vec<u8>,
}

impl<S, C: EffectClass> Idempotency<S, C> {
    async fn answer<ReqB, ResB>(
        mut self,
        request: Request<ReqB>,
    ) -> std::result::Result<Response<HttpBody>, S::Error>
    where
        S: Service<Request<HttpBody>, Response = Response<ResB>>,
        ReqB: Body<Data = Bytes> + Send + 'static,
        ReqB::Error: Into<BoxError>,
        ResB: Body<Data = Bytes> + Send + 'static,
        ResB::Error: Into<BoxError>,
    {
        let key = self.desk.key(&request);
        let key = match key {
            Ok(Some(key)) => key,
            Ok(None) => {
                let passed = self.inner.call(request.map(HttpBody::passed)).await?;
                return Ok(passed.map(HttpBody::passed));
            }
            Err(refused) => return Ok(*refused),
        };
        let (keyed, mut request) = match self.desk.whole(key, request).await {
            Ok(whole) => whole,
            Err(refused) => return Ok(*refused),
        };
        let (started, attempt) = match self.desk.start(keyed).await {
            Ok(Ok(begun)) => begun,
            Ok(Err(refused)) => return Ok(*refused),
            Err(error) => return Ok(answer::store_failed(error)),
        };
        request.extensions_mut().insert(attempt);
        // From here on a drop of this future, and a panic, leave the outcome unknown.
        let response = match self.inner.call(request).await {
            Ok(response) => response,
            Err(error) => {
                // The guard's end is the same whether or not this can be written.
                let _ended = started.fail_async(unknown("the service failed")).await;
                return Err(error);
            }
        };
        let recorded = self.desk.record(started, response).await;
        Ok(recorded.unwrap_or_else(answer::store_failed))
    }
}

impl<C: EffectClass> Desk<C> {
    /// Returns the key of a request; `None` if it passes through.
    fn key<B>(
        &self,
        request: &Request<B>,
    ) -> std::result::Result<Option<String>, Box<Response<HttpBody>>> {
        let settings = &self.settings;
        if !settings.methods.contains(request.method()) {
            return Ok(None);
        }
        match key_of(request.headers(), settings.key_bytes_max) {
            Ok(key) => Ok(Some(key)),
            Err(NoKey::Missing) if !settings.is_required => Ok(None),
            Err(why) => Err(Box::new(answer::no_key(why))),
        }
    }

    /// Reads the request to its end. Nothing is claimed yet.
    async fn whole<B>(
        &self,
        key: String,
        request: Request<B>,
    ) -> std::result::Result<(Keyed, Request<HttpBody>), Box<Response<HttpBody>>>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let (parts, body) = request.into_parts();
        // A key of a principal has two parts and one of nobody has one, so they are never equal.
        let key = match &self.settings.principal_of {
            None => KeyParts::of([key]),
            Some(principal_of) => match principal_of(&parts) {
                Some(principal) => KeyParts::of([principal, key]),
                None => return Err(Box::new(answer::no_principal())),
            },
        };
        let bytes_max = self.settings.body_bytes_max;
        if body.size_hint().lower() > bytes_max as u64 {
            return Err(Box::new(answer::body_too_large()));
        }
        let body = match Limited::new(body, bytes_max).collect().await {
            Ok(body) => body,
            Err(error) if error.is::<LengthLimitError>() => {
                return Err(Box::new(answer::body_too_large()));
            }
            Err(_broken) => return Err(Box::new(answer::body_broken())),
        };
        let trailers = body.trailers().cloned();
        let body = body.to_bytes();
        let mut evidence = format!("{} {}", parts.method, parts.uri.path()).into_bytes();
        evidence.truncate(EVIDENCE_BYTES_MAX);
        let keyed = Keyed {
            key,
            fingerprint: fingerprint(&parts, &body),
            evidence,
        };
        let request = Request::from_parts(parts, HttpBody::whole(body, trailers));
        Ok((keyed, request))
    }

    /// Claims and starts the request, or says what it is answered instead.
    async fn start(
        &self,
        keyed: Keyed,
    ) -> Result<std::result::Result<(Started<C>, Attempt), Box<Response<HttpBody>>>> {
        let after_max = self.settings.retry_after_max;
        let options = self.settings.claim.clone().fingerprint(keyed.fingerprint);
        let namespace = &self.namespace;
        let verdict = match self.settings.wait {
            None => namespace.claim_with_async(&keyed.key, &options).await?,
            Some(deadline) => {
                namespace
                    .claim_wait_with_async(&keyed.key, &options, deadline)
                    .await?
            }
        };
        let (claim, attempt) = match namespace.attempt(verdict) {
            Ok(begun) => begun,
            Err(verdict) => return Ok(Err(Box::new(answer::refused(&verdict, after_max)))),
        };
        // The other classes write no start: a crash is the same with and without one.
        if !C::KIND.starts_durably() {
            return Ok(Ok((claim.into_started(), attempt)));
        }
        match claim.start_async(&keyed.evidence).await {
            Ok(started) => Ok(Ok((started, attempt))),
            Err(StartError::Fenced { current }) => {
                Ok(Err(Box::new(answer::of_state(&current, after_max))))
            }
            Err(StartError::Failed { error, .. }) => Err(error),
        }
    }

    /// Records what the service answered, and returns what the client is told.
    async fn record<B>(
        &self,
        mut started: Started<C>,
        response: Response<B>,
    ) -> Result<Response<HttpBody>>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let after_max = self.settings.retry_after_max;
        if let Some(failure) = failure(&response) {
            return Ok(match started.fail_async(failure).await? {
                Change::Applied(_) => response.map(HttpBody::passed),
                Change::Fenced { current } => answer::of_state(&current, after_max),
            });
        }
        let (outcome, response) = self.outcome(response).await;
        let commit = match outcome {
            Some(outcome) => Commit::new(outcome),
            None => Commit::without_outcome(),
        };
        let verdict = started.commit_with_async(commit).await?;
        Ok(answer::lost(&verdict, after_max).unwrap_or(response))
    }

    /// Returns the outcome that stands for a response, and the response with a body to pass on.
    async fn outcome<B>(&self, response: Response<B>) -> (Option<Vec<u8>>, Response<HttpBody>)
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let bytes_max = self.namespace.space.options.outcome_bytes_max;
        let fits = |bytes: Vec<u8>| Some(bytes).filter(|bytes| bytes.len() <= bytes_max);
        let (parts, body) = response.into_parts();
        let head = StoredResponse::of(parts.status, &parts.headers, &self.settings.kept_headers);
        let head_bytes = head.clone().into_bytes();
        let left = bytes_max.saturating_sub(head_bytes.len());
        let is_small = body
            .size_hint()
            .exact()
            .is_some_and(|bytes| bytes <= left as u64);
        if !is_small || parts.status.is_informational() {
            return (
                fits(head_bytes),
                Response::from_parts(parts, HttpBody::passed(body)),
            );
        }
        let Ok(body) = Limited::new(body, left).collect().await else {
            return (fits(head_bytes), answer::answer_broken());
        };
        let trailers = body.trailers().cloned();
        let body = body.to_bytes();
        let stored = match trailers {
            None => head.with_body(body.clone()).into_bytes(),
            Some(_) => head_bytes,
        };
        let response = Response::from_parts(parts, HttpBody::whole(body, trailers));
        (fits(stored), response)
    }
}

/// Says how the attempt failed, if it did: the service's own word first.
fn failure<B>(response: &Response<B>) -> Option<Failure> {
    if let Some(failure) = response.extensions().get::<Failure>() {
        return Some(failure.clone());
    }
    let status = response.status();
    status
        .is_server_error()
        .then(|| unknown(format!("the service answered {}", status.as_u16())))
}

fn unknown(evidence: impl Into<String>) -> Failure {
    Failure::Unknown {
        evidence: evidence.into().into_bytes(),
    }
}

/// Hashes what must be equal in two requests of one key. The lengths keep the parts apart; the
/// hash is a cryptographic one, because clients choose the bytes.
fn fingerprint(parts: &Parts, body: &[u8]) -> Fingerprint {
    let target = parts
        .uri
        .path_and_query()
        .map_or("", |target| target.as_str());
    let mut hasher = Sha256::new();
    for part in [parts.method.as_str().as_bytes(), target.as_bytes(), body] {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    let mut bytes = [0; 16];
    for (to, from) in bytes.iter_mut().zip(hasher.finalize()) {
        *to = from;
    }
    Fingerprint::from_bytes(bytes)
}
