//! A body that is either whole and in memory, or somebody else's that is passed on as it comes.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use ::http::HeaderMap;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use http_body_util::combinators::UnsyncBoxBody;

/// An error of a body that is passed on.
pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The body of the requests that [`Idempotency`](crate::Idempotency) hands on and of the
/// responses that it gives.
pub struct HttpBody(Kind);

enum Kind {
    Whole {
        data: Option<Bytes>,
        trailers: Option<HeaderMap>,
    },
    Passed(UnsyncBoxBody<Bytes, BoxError>),
}

impl HttpBody {
    pub(super) fn whole(data: Bytes, trailers: Option<HeaderMap>) -> Self {
        let data = Some(data).filter(|data| !data.is_empty());
        HttpBody(Kind::Whole { data, trailers })
    }

    pub(super) fn passed<B>(body: B) -> Self
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        HttpBody(Kind::Passed(body.map_err(Into::into).boxed_unsync()))
    }
}

impl Body for HttpBody {
    type Data = Bytes;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match &mut self.0 {
            Kind::Passed(body) => Pin::new(body).poll_frame(cx),
            Kind::Whole { data, trailers } => {
                let next = data.take().map(Frame::data);
                let next = next.or_else(|| trailers.take().map(Frame::trailers));
                Poll::Ready(next.map(Ok))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Passed(body) => body.is_end_stream(),
            Kind::Whole { data, trailers } => data.is_none() && trailers.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Passed(body) => body.size_hint(),
            Kind::Whole { data, .. } => {
                SizeHint::with_exact(data.as_ref().map_or(0, |data| data.len() as u64))
            }
        }
    }
}

impl fmt::Debug for HttpBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpBody")
            .field("size_hint", &self.size_hint())
            .finish_non_exhaustive()
    }
}
