//! Requests with an `Idempotency-Key` header: carried out once, answered alike ever after.
//!
//! The order of steps is what keeps the promise. Nothing is claimed before the request is there
//! as a whole, for another payload must be told apart; the service is called under a started claim
//! only; its response is given to the client after it is recorded.

mod answer;
mod body;
mod key_header;
mod service;
mod stored;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ::http::header;
use ::http::request::Parts;
use ::http::{HeaderName, Method};
use tower_layer::Layer;

pub use body::HttpBody;
pub use service::Idempotency;
pub use stored::StoredResponse;

use crate::engine::class::EffectClass;
use crate::engine::namespace::{ClaimOptions, Namespace};
use crate::options::LEASE_DEFAULT;

/// The longest `Idempotency-Key`, in bytes, if nothing else is set.
pub const HTTP_KEY_BYTES_DEFAULT: usize = 255;
/// The largest body of a request with a key, in bytes, if nothing else is set.
pub const HTTP_BODY_BYTES_DEFAULT: usize = 1024 * 1024;
/// How long a client is told at most to wait for a request that is being carried out, if nothing
/// else is set: as long as [`LEASE_DEFAULT`](crate::LEASE_DEFAULT), 60 s. A longer lease is for an
/// owner that may hang, not for one that works; a client that asks once a minute costs a look-up.
pub const HTTP_RETRY_AFTER_DEFAULT: Duration = LEASE_DEFAULT;

/// The headers of a response that are kept and given again, if nothing else is set. `Set-Cookie`
/// is not among them, nor is anything about the connection or the moment.
const KEPT_HEADERS_DEFAULT: [HeaderName; 7] = [
    header::CONTENT_TYPE,
    header::CONTENT_ENCODING,
    header::CONTENT_LANGUAGE,
    header::CONTENT_LOCATION,
    header::ETAG,
    header::LAST_MODIFIED,
    header::LOCATION,
];

type PrincipalOf = Arc<dyn Fn(&Parts) -> Option<String> + Send + Sync>;

/// A tower layer that carries out each request with an `Idempotency-Key` once, and answers the
/// copies with the same response.
///
/// The class of the namespace says what happens when nobody knows whether a request took effect:
/// after a crash, a response of status 5xx, a panic, or a client that went away. See
/// `docs/http.md` for the table of answers.
pub struct IdempotencyLayer<C> {
    namespace: Namespace<C>,
    settings: Settings,
}

#[derive(Clone)]
struct Settings {
    principal_of: Option<PrincipalOf>,
    is_required: bool,
    methods: Vec<Method>,
    key_bytes_max: usize,
    body_bytes_max: usize,
    wait: Option<Duration>,
    retry_after_max: Duration,
    claim: ClaimOptions,
    kept_headers: Vec<HeaderName>,
}

impl<C: EffectClass> IdempotencyLayer<C> {
    /// Makes a layer whose keys belong to principals: two principals that send the same key have
    /// nothing in common. `principal_of` says who sends a request, by what the authentication in
    /// front of this layer has put into it; a request with a key and without a principal is
    /// refused.
    pub fn new(
        namespace: Namespace<C>,
        principal_of: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        IdempotencyLayer::with(namespace, Some(Arc::new(principal_of)))
    }

    /// Makes a layer whose keys are shared by all who send requests. Whoever sends the key and the
    /// payload of somebody else gets that one's response.
    pub fn shared(namespace: Namespace<C>) -> Self {
        IdempotencyLayer::with(namespace, None)
    }

    fn with(namespace: Namespace<C>, principal_of: Option<PrincipalOf>) -> Self {
        let settings = Settings {
            principal_of,
            is_required: true,
            methods: vec![Method::POST, Method::PATCH],
            key_bytes_max: HTTP_KEY_BYTES_DEFAULT,
            body_bytes_max: HTTP_BODY_BYTES_DEFAULT,
            wait: None,
            retry_after_max: HTTP_RETRY_AFTER_DEFAULT,
            claim: ClaimOptions::new(),
            kept_headers: KEPT_HEADERS_DEFAULT.to_vec(),
        };
        IdempotencyLayer {
            namespace,
            settings,
        }
    }

    /// Sets whether a request without a key is refused, or passed through as if there were no
    /// layer. Default: refused.
    #[must_use]
    pub fn required(mut self, is_required: bool) -> Self {
        self.settings.is_required = is_required;
        self
    }

    /// Sets the methods whose requests have keys; all others pass through. Default: POST and
    /// PATCH, the ones that HTTP itself does not call idempotent.
    #[must_use]
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.settings.methods = methods.into_iter().collect();
        self
    }

    /// Sets the longest key, in bytes. Default: [`HTTP_KEY_BYTES_DEFAULT`].
    #[must_use]
    pub fn key_bytes_max(mut self, bytes: usize) -> Self {
        self.settings.key_bytes_max = bytes;
        self
    }

    /// Sets the largest body of a request, in bytes; it is in memory while the request is carried
    /// out. Default: [`HTTP_BODY_BYTES_DEFAULT`].
    #[must_use]
    pub fn body_bytes_max(mut self, bytes: usize) -> Self {
        self.settings.body_bytes_max = bytes;
        self
    }

    /// Has a copy wait for the response of the request that is being carried out, at most this
    /// long; it is answered 409 then. Default: it is answered 409 at once.
    #[must_use]
    pub fn wait(mut self, deadline: Duration) -> Self {
        self.settings.wait = Some(deadline);
        self
    }

    /// Sets the largest `Retry-After` of a copy that is answered 409 because the request is being
    /// carried out; it is told whole seconds, and at least one. Default:
    /// [`HTTP_RETRY_AFTER_DEFAULT`]. The pause after a failure (503) is told as it is: before it
    /// is over, nothing is carried out.
    #[must_use]
    pub fn retry_after_max(mut self, after: Duration) -> Self {
        self.settings.retry_after_max = after;
        self
    }

    /// Has the lease of a request renewed while the service works on it, until `ceiling` after
    /// its claim; see [`ClaimOptions::auto_renew`]. Default: not renewed; a request that takes
    /// longer than the namespace's lease is given up then.
    #[must_use]
    pub fn auto_renew(mut self, ceiling: Duration) -> Self {
        self.settings.claim = self.settings.claim.auto_renew(ceiling);
        self
    }

    /// Sets the headers of a response that are kept and given again; the first response has all
    /// of its headers. Default: `Content-Type`, `-Encoding`, `-Language`, `-Location`, `ETag`,
    /// `Last-Modified`, `Location`.
    #[must_use]
    pub fn kept_headers(mut self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.settings.kept_headers = names.into_iter().collect();
        self
    }
}

impl<S, C: EffectClass> Layer<S> for IdempotencyLayer<C> {
    type Service = Idempotency<S, C>;

    fn layer(&self, inner: S) -> Idempotency<S, C> {
        let settings = Arc::new(self.settings.clone());
        Idempotency::new(inner, self.namespace.clone(), settings)
    }
}

impl<C> Clone for IdempotencyLayer<C> {
    fn clone(&self) -> Self {
        IdempotencyLayer {
            namespace: self.namespace.clone(),
            settings: self.settings.clone(),
        }
    }
}

impl<C> fmt::Debug for IdempotencyLayer<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer")
            .field("namespace", &self.namespace)
            .field("required", &self.settings.is_required)
            .field("methods", &self.settings.methods)
            .finish_non_exhaustive()
    }
}
