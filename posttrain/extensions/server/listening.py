"""HTTP server settings: `server_config` for uvicorn, and `PromptH11` with a time limit for request headers."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

# Maximum number of seconds until all headers of a request have arrived. Clients send headers without delay.
HEADER_S = 20.0
# Number of seconds for which an idle connection stays open. Clients reuse connections between training steps. They would
# have to retry a request on a connection that the server has closed.
KEEP_ALIVE_S = 120


class PromptH11(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with a time limit for request headers.

    uvicorn limits the size of headers and the idle time after a response, but not the time before the first request.
    Without this time limit, a client that sends nothing could keep a connection open forever, even without a token.
    """

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the time limit for the first request."""
        super().connection_made(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        """Start the time limit when a new request begins. Stop the time limit when the headers are complete."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self.conn.trailing_data[0] and self._late is None:
            self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        self._late = self.loop.call_later(HEADER_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def server_config(app: Any, **options: Any) -> uvicorn.Config:
    """Return uvicorn's config for an application of this package. ``options`` are additional options of `uvicorn.Config`."""
    return uvicorn.Config(app, http=PromptH11, ws="none", access_log=False, timeout_keep_alive=KEEP_ALIVE_S, **options)
