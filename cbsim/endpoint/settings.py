"""What an endpoint allows: bounds, deadlines, keys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """Times are seconds of the event loop's clock. `keys` are SHA-256 digests; without any, everybody may ask."""

    keys: tuple[bytes, ...] = ()
    insecure: bool = False  # no key, and yet open to other machines
    max_body_bytes: int = 4 << 20
    max_head_bytes: int = 64 << 10
    max_connections: int = 4096
    max_streams: int = 8192  # answers under way
    max_queued_requests: int = 8192  # of them, those that the server has not begun
    max_queued_tokens: int = 1 << 26  # of their prompts
    max_unread_tokens: int = 65_536  # of a stream, that its client has not taken
    max_unread_sum: int = 4 << 20  # of all streams
    max_prompts: int = 128  # in a request
    head_s: float = 10.0  # for a request's line and headers to arrive
    body_s: float = 30.0  # for its body
    idle_s: float = 60.0  # between two requests of a connection
    stall_s: float = 120.0  # for a client to read on, once its socket is full
    grace_s: float = 30.0  # for answers under way to end, once it is time to go
    retry_s: int = 1  # what a client is told to wait that is turned away
    inline_characters: int = 16_384  # a longer text is encoded in a thread; threads end in any order
    request_metrics: bool = False  # every answer says what its request waited for; else where `include_metrics` asks
