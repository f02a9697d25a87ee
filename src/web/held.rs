//! The connection of a request belongs to whoever sends it, until it is answered.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::{
    body::{Body, Bytes, HttpBody},
    http::{Extensions, StatusCode, header},
    response::{IntoResponse, Response},
};
use hyper::body::{Frame, SizeHint};

use super::client::Client;
use crate::process::connections::{Place, Serving};

/// When somebody who has too many connections may try again, in seconds.
const AGAIN: &str = "5";

/// A request that is being answered. `None`: no connection is known.
pub(super) struct Held(Option<Serving>);

impl Held {
    /// The connection of a request with these extensions, for that person or a stranger.
    ///
    /// # Errors
    /// If she has too many connections.
    pub fn begin(extensions: &mut Extensions, person: Option<&str>) -> Result<Self, Box<Response>> {
        let (Some(place), Some(client)) = (extensions.remove::<Arc<Place>>(), extensions.get::<Client>()) else {
            return Ok(Self(None));
        };
        let too_many = |_| Box::new((StatusCode::TOO_MANY_REQUESTS, [(header::RETRY_AFTER, AGAIN)]).into_response());
        place.serve(client.address, person).map(|serving| Self(Some(serving))).map_err(too_many)
    }

    /// The answer, at whose end the connection is anybody's again. After the change to a WebSocket it is never.
    pub fn until_answered(self, response: Response) -> Response {
        match self.0 {
            Some(serving) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                serving.keep();
                response
            }
            Some(serving) => response.map(|body| Body::new(HeldBody { body, _serving: serving })),
            None => response,
        }
    }
}

struct HeldBody {
    body: Body,
    _serving: Serving,
}

impl HttpBody for HeldBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
