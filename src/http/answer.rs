//! What is a client told that is not told what the service says?

use std::sync::Arc;
use std::time::Duration;

use ::http::header::{CONTENT_TYPE, RETRY_AFTER};
use ::http::{HeaderName, HeaderValue, Response, StatusCode};
use bytes::Bytes;

use super::body::HttpBody;
use super::key_header::NoKey;
use super::stored::StoredResponse;
use crate::engine::run_once::RunVerdict;
use crate::error::{Error, ErrorKind};
use crate::verdict::{CommitVerdict, Done, KeyState};

/// Marks a response that was given before.
const REPLAYED_HEADER: HeaderName = HeaderName::from_static("idempotency-replayed");

/// A response of the layer itself, as RFC 9457 wants it.
struct Problem {
    status: StatusCode,
    code: &'static str,
    detail: &'static str,
    retry_after: Option<Duration>,
    original_status: Option<u16>,
}

impl Problem {
    fn new(status: StatusCode, code: &'static str, detail: &'static str) -> Self {
        Problem {
            status,
            code,
            detail,
            retry_after: None,
            original_status: None,
        }
    }

    fn retry_after(self, after: Duration) -> Self {
        Problem {
            retry_after: Some(after),
            ..self
        }
    }

    fn response(self) -> Response<HttpBody> {
        // Every text is one of this file: nothing in it needs an escape.
        let mut json = format!(
            r#"{{"type":"about:blank","title":"{}","status":{},"code":"{}","detail":"{}""#,
            self.status.canonical_reason().unwrap_or_default(),
            self.status.as_u16(),
            self.code,
            self.detail,
        );
        if let Some(status) = self.original_status {
            json.push_str(&format!(r#","original_status":{status}"#));
        }
        json.push('}');
        let mut response = Response::new(HttpBody::whole(Bytes::from(json), None));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        let media_type = HeaderValue::from_static("application/problem+json");
        headers.insert(CONTENT_TYPE, media_type);
        if let Some(after) = self.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds(after)));
        }
        response
    }
}

/// Whole seconds, not too early and at least one: a client that is told 0 asks in a loop.
fn seconds(after: Duration) -> u64 {
    let more = u64::from(after.subsec_nanos() > 0);
    after.as_secs().saturating_add(more).max(1)
}

pub(super) fn no_key(why: NoKey) -> Response<HttpBody> {
    let (code, detail) = match why {
        NoKey::Missing => (
            "key-missing",
            "this request needs an Idempotency-Key header",
        ),
        NoKey::Malformed(detail) => ("key-malformed", detail),
    };
    Problem::new(StatusCode::BAD_REQUEST, code, detail).response()
}

pub(super) fn no_principal() -> Response<HttpBody> {
    let detail = "it is not known whose Idempotency-Key this is";
    Problem::new(StatusCode::BAD_REQUEST, "principal-missing", detail).response()
}

pub(super) fn body_too_large() -> Response<HttpBody> {
    let detail = "the body is larger than may be kept while it is compared; nothing was done";
    Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "body-too-large", detail).response()
}

pub(super) fn body_broken() -> Response<HttpBody> {
    let detail = "the body broke off; nothing was done";
    Problem::new(StatusCode::BAD_REQUEST, "body-broken", detail).response()
}

pub(super) fn answer_broken() -> Response<HttpBody> {
    let detail = "the request was carried out, and its response broke off";
    Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "answer-broken", detail).response()
}

/// The store could not answer, or not write. The error goes along for whoever logs responses.
pub(super) fn store_failed(error: Error) -> Response<HttpBody> {
    let status = match error.kind() {
        ErrorKind::Invalid => StatusCode::INTERNAL_SERVER_ERROR,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    let detail = "the request may or may not have been carried out; retry with the same key";
    let mut response = Problem::new(status, "store-failed", detail).response();
    response.extensions_mut().insert(Arc::new(error));
    response
}

fn conflict(code: &'static str, detail: &'static str) -> Problem {
    Problem::new(StatusCode::CONFLICT, code, detail)
}

/// What is left of a lease is the latest moment, not the likely one, so a long one is cut.
fn in_flight(lease_left: Duration, after_max: Duration) -> Response<HttpBody> {
    let detail = "a request with this key is being carried out";
    conflict("in-flight", detail)
        .retry_after(lease_left.min(after_max))
        .response()
}

fn backoff(after: Duration) -> Response<HttpBody> {
    let detail = "an earlier attempt failed; retry later with the same key";
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "backoff", detail)
        .retry_after(after)
        .response()
}

fn rejected() -> Response<HttpBody> {
    let detail = "the request was refused for good; retry it with another key, if at all";
    conflict("rejected", detail).response()
}

fn dead() -> Response<HttpBody> {
    let detail = "the request failed too often, or was given up";
    conflict("dead", detail).response()
}

fn in_doubt() -> Response<HttpBody> {
    let detail = "the request may or may not have been carried out; it will not be carried out \
                  again before somebody has found out";
    conflict("in-doubt", detail).response()
}

fn other_payload() -> Response<HttpBody> {
    let detail = "this key was used for another request; use a new key for a new request";
    Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "other-payload", detail).response()
}

/// Gives the response again, or says that it was not kept.
fn replay(done: &Done) -> Response<HttpBody> {
    let stored = done.outcome.bytes().and_then(StoredResponse::parse);
    let status = stored.as_ref().map(StoredResponse::status);
    if let Some(mut response) = stored.and_then(StoredResponse::response) {
        let marker = HeaderValue::from_static("true");
        response.headers_mut().insert(REPLAYED_HEADER, marker);
        return response;
    }
    let detail = "the request was carried out; its response was not kept";
    let mut problem = conflict("answer-not-kept", detail);
    problem.original_status = status;
    problem.response()
}

/// Answers a request whose effect must not run. `after_max` bounds how long a client is told to
/// wait for somebody else's request.
pub(super) fn refused(verdict: &RunVerdict, after_max: Duration) -> Response<HttpBody> {
    match verdict {
        RunVerdict::Busy { lease_left, .. } => in_flight(*lease_left, after_max),
        RunVerdict::Replayed(done) => replay(done),
        RunVerdict::Backoff { after, .. } => backoff(*after),
        RunVerdict::Rejected { .. } => rejected(),
        RunVerdict::Dead { .. } => dead(),
        RunVerdict::InDoubt(_) => in_doubt(),
        RunVerdict::Mismatch => other_payload(),
        RunVerdict::Ran { commit, .. } => {
            lost(commit, after_max).unwrap_or_else(|| in_flight(Duration::ZERO, after_max))
        }
        RunVerdict::Failed { state } => of_state(state, after_max),
    }
}

/// Answers a request whose claim was lost before its response was recorded: what others recorded
/// is the response. `None` if it was not lost.
pub(super) fn lost(commit: &CommitVerdict, after_max: Duration) -> Option<Response<HttpBody>> {
    match commit {
        CommitVerdict::Committed { .. } | CommitVerdict::AlreadyCommitted => None,
        CommitVerdict::Conflict { current, .. } => Some(replay(current)),
        CommitVerdict::Fenced { current, .. } => Some(of_state(current, after_max)),
        CommitVerdict::CellConflict { .. } => Some(in_flight(Duration::ZERO, after_max)),
    }
}

pub(super) fn of_state(state: &KeyState, after_max: Duration) -> Response<HttpBody> {
    match state {
        KeyState::Done(done) => replay(done),
        KeyState::Pending { lease_left, .. } => in_flight(*lease_left, after_max),
        KeyState::Failed { retry_after, .. } => backoff(*retry_after),
        KeyState::Rejected { .. } => rejected(),
        KeyState::Dead { .. } => dead(),
        KeyState::InDoubt(_) => in_doubt(),
        // Forgotten meanwhile: whoever asks again gets it.
        KeyState::Absent | KeyState::Seen => backoff(Duration::ZERO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_told_in_whole_seconds_and_never_too_short() {
        for (millis, told) in [(0, 1), (1, 1), (1000, 1), (1001, 2), (59_500, 60)] {
            assert_eq!(seconds(Duration::from_millis(millis)), told);
        }
        assert_eq!(seconds(Duration::MAX), u64::MAX);
    }
}
