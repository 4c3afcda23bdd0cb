"""Every exception that manyroots raises on purpose.

ManyrootsError
  ConfigError        a setting can't work; raised at start, names the flag
  ModelError         weights, config or tokenizer can't be used; raised at start
  RequestError       a request can't be served as written (HTTP 400); names the field
    NotFoundError    it names something that does not exist (404)
    TooLongError     it and its completion don't fit the model's context (400)
    TooLargeError    it is larger than the server takes (413)
    AdapterError     an adapter's files can't be served by this model (400)
  OverloadedError    the queue is full (429); try again later
  UnavailableError   starting, draining or dead (503)

Each message says what, with the value, and what to do about it.
"""

from __future__ import annotations


class ManyrootsError(Exception):
    """Base of the tree; catching it catches everything that manyroots raises on purpose."""


class ConfigError(ManyrootsError):
    """A setting, or a combination of settings, that can't work."""


class ModelError(ManyrootsError):
    """A model folder, file or config that can't be loaded."""


class RequestError(ManyrootsError):
    """A request that can't be served as written."""

    status = 400

    def __init__(self, message: str, *, field: str | None) -> None:
        super().__init__(message)
        self.field = field


class NotFoundError(RequestError):
    """A request that names something this server does not have."""

    status = 404


class TooLongError(RequestError):
    """A prompt, with or without its completion, over the model's context length."""


class TooLargeError(RequestError):
    """A request over one of the server's size limits."""

    status = 413


class AdapterError(RequestError):
    """An adapter's folder, config or weights that can't be served."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message, field=field)


class OverloadedError(ManyrootsError):
    """The bounded queue is full."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(ManyrootsError):
    """The engine is starting, draining or dead."""
