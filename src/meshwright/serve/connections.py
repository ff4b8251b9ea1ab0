"""Client connections with deadlines for the complete request and for reading an answer, so that clients which stall do
not occupy slots."""

import asyncio
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 512
"""Connections at a time; more are refused with a request to retry."""
REQUEST_SECONDS = 60.0
"""From a connection, or the end of an answer, to the end of the next request."""
READING_SECONDS = 60.0
"""From a full buffer of unread answers until the client has read most of it."""


class Connection(H11Protocol):
    """One client's connection."""

    request_seconds, reading_seconds = REQUEST_SECONDS, READING_SECONDS
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit of the first request."""
        super().connection_made(transport)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        """Read data; stop the time limit once a request is complete."""
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._forget()

    def on_response_complete(self) -> None:
        """Called at the end of an answer."""
        super().on_response_complete()
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the time limits."""
        self._forget()
        self._forget_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Called when the buffer of unread answers is full."""
        super().pause_writing()
        self._unread = self.loop.call_later(self.reading_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Called when the client has read most of the buffer."""
        self._forget_unread()
        super().resume_writing()

    def _await_request(self) -> None:
        self._forget()
        self._deadline = self.loop.call_later(self.request_seconds, self.transport.abort)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


def configured(app: ASGIApp, **more: Any) -> uvicorn.Config:
    """uvicorn's configuration for the application."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=5,
        server_header=False,
        proxy_headers=False,
        **more,
    )
