"""What one client may cost: every bound and deadline of the HTTP side, in one place so that tests can shrink them."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(slots=True, frozen=True)
class Limits:
    """Bounds per request and per connection. `max_connections` None: taken from the descriptor limit."""

    max_body_bytes: int = 32 * MIB
    header_timeout_s: float = 30.0
    """From the first byte of a request (or the accept) to the end of its header, however it dribbles in."""
    body_timeout_s: float = 30.0
    keepalive_timeout_s: float = 75.0
    write_buffer_bytes: int = MIB
    drain_timeout_s: float = 30.0
    """How long a client may leave a full write buffer (or a finished answer) unread before it is dropped."""
    max_connections: int | None = None
    max_tokenizing: int = 1024
    """Requests that may wait for the two tokeniser threads; beyond it 429."""


DEFAULT_LIMITS = Limits()
