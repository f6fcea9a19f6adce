"""An HTTP connection: that of uvicorn, which has neither deadlines nor bounds, with both added."""

from __future__ import annotations

import asyncio
import contextlib

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from cbsim.http.asgi import EXTENSION, ApiError
from cbsim.http.settings import Settings

MOST_PIPELINED = 16
LINGER_S, LINGER_BYTES = 1.0, 64 << 20


class Connection(HttpToolsProtocol):
    """A connection with deadlines for a request's head and body to arrive and for a full socket to be read, and a bound
    of the head's size. A connection that exceeds one is closed, with an error if no answer was under way. A socket that
    is closed while bytes are unread resets, and the client may lose its answer. So after a last answer to an incomplete
    request the rest is read and dropped for a while, except for a connection above the limit.
    """

    def __init__(self, config: Config, state: ServerState, settings: Settings, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(config, state, {}, loop)
        self._settings = settings
        self._answering: RequestResponseCycle | None = None  # `cycle` is the newest request; it may wait for this
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._in_head = True
        self._head_bytes = 0
        self._api_error: ApiError | None = None
        self._to_drop: int | None = None  # bytes left to drop, once it lingers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._settings.max_connections:
            message = f"more than {self._settings.max_connections} connections are open"
            self._write_error(ApiError(503, message, retry_s=self._settings.retry_s))
            self.shut()
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._to_drop is not None:
            self._to_drop -= len(data)
            if self._to_drop < 0:
                self.shut()
            return
        if self._deadline is None and self._answering is None:
            self._await_head()
        super().data_received(data)
        if self._in_head and not self.lingers:
            self._head_bytes += len(data)
            if self._head_bytes > self._settings.max_head_bytes and not self.transport.is_closing():
                self._close(self._too_large)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._leave()
        self._unwatch_reader()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():
            self._unwatch_reader()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        self.shut()

    def shutdown(self) -> None:
        """Close the connection, after its answer if one is under way. An incomplete request gets an error."""
        if self.lingers:
            self.shut()
        elif (cycle := self._answering) is not None and cycle.more_body and not cycle.response_started:
            self._close(ApiError(503, "the server is shutting down", retry_s=self._settings.retry_s))
        else:
            super().shutdown()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if self._deadline is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._settings.max_head_bytes:
            self._api_error = self._too_large
            raise ValueError("the head is too large")  # stops the parser, which reports it to data_received
        if len(self.pipeline) >= MOST_PIPELINED:
            self._api_error = ApiError(400, f"more than {MOST_PIPELINED} requests at once")
            raise ValueError("too many requests at once")
        self._in_head = False
        super().on_headers_complete()
        self.cycle.transport = _Outlet(self, self.cycle)  # type: ignore[assignment]
        self.scope["extensions"] = {EXTENSION: {"writer": _Body(self, self.cycle)}}
        if self.pipeline:
            self._disarm()  # it is not read further until the previous one has its answer
        else:
            self._answering = self.cycle
            self._arm(self._settings.body_s, "the body of the request")

    def on_message_complete(self) -> None:
        self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.lingers:
            return  # pipelined requests are not started
        self._answering = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self.cycle is not None and not self.cycle.response_complete and self.cycle.more_body:
            self._arm(self._settings.body_s, "the body of the request")

    def send_400_response(self, msg: str) -> None:
        """Close with an error; called for bytes that are not HTTP, or a request rejected while it was parsed."""
        self._close(self._api_error or ApiError(400, msg))

    def linger(self) -> None:
        """Write nothing more, and drop the bytes that still arrive."""
        self._to_drop = LINGER_BYTES
        self._disarm()
        self._deadline = self.loop.call_later(LINGER_S, self.shut)
        self.flow.resume_reading()
        with contextlib.suppress(OSError):  # the client has disconnected
            self.transport.write_eof()

    def shut(self) -> None:
        """Close once all written bytes are sent, within a deadline."""
        self.transport.close()
        self._watch_reader()

    @property
    def lingers(self) -> bool:
        return self._to_drop is not None

    @property
    def _too_large(self) -> ApiError:
        return ApiError(431, f"the head of the request is longer than {self._settings.max_head_bytes} bytes")

    def _watch_reader(self) -> None:
        """Start the deadline after which a client that does not read is disconnected."""
        if self._stall is None:
            self._stall = self.loop.call_later(self._settings.stall_s, self.transport.abort)

    def _unwatch_reader(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _await_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._arm(self._settings.head_s, "the head of the request")

    def _arm(self, seconds: float, what: str) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, self._late, seconds, what)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self, seconds: float, what: str) -> None:
        self._deadline = None
        self._close(ApiError(408, f"{what} has not come within {seconds:g} s"))

    def _close(self, error: ApiError) -> None:
        """Write the error if no answer has begun, and close."""
        self._disarm()
        self._leave()
        if self._answering is None or not self._answering.response_started:
            self._write_error(error)
            self.linger()
        else:
            self.shut()

    def _leave(self) -> None:
        """Notify the coroutine of an answer that its client has disconnected."""
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def _write_error(self, error: ApiError) -> None:
        head = [b"HTTP/1.1 %d Refused" % error.status, b"content-type: application/json", b"connection: close"]
        head += [name + b": " + value for name, value in error.headers]
        body = error.body
        self.transport.write(b"\r\n".join([*head, b"content-length: %d" % len(body), b"", body]))


class _Body:
    """A ResponseWriter of a streamed answer: HTTP chunks, written without the cycle's coroutine."""

    __slots__ = ("_cycle", "_flow", "_is_closing", "_write", "abort")

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._cycle, self._flow = cycle, connection.flow
        self._write, self._is_closing = connection.transport.write, connection.transport.is_closing
        self.abort = connection.transport.abort

    @property
    def full(self) -> bool:
        return self._flow.write_paused

    def write(self, body: bytes) -> None:
        if not (self._cycle.disconnected or self._is_closing()):
            self._write(b"%x\r\n%b\r\n" % (len(body), body))

    async def drain(self) -> None:
        await self._flow.drain()


class _Outlet:
    """The transport to which an answer is written. It closes at once if its request is complete, else it lingers."""

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection, self._cycle = connection, cycle
        self.is_closing = connection.transport.is_closing

    def write(self, data: bytes) -> None:
        if not self._connection.lingers:
            self._connection.transport.write(data)

    def close(self) -> None:
        if self._cycle.more_body and not self.is_closing():
            self._connection.linger()
        else:
            self._connection.shut()
