"""The session that a request belongs to, as its `x-session-id` header says: a hint for routing.

A context variable, because it is a matter of the HTTP layer and of the gateway alone: nothing
between them, and no engine, has to pass it on.
"""

from __future__ import annotations

from contextvars import ContextVar

SESSION_HEADER = "x-session-id"
MAX_SESSION_CHARS = 256
current_session: ContextVar[str | None] = ContextVar("current_session", default=None)
