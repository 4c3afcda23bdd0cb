"""How messages cross between processes: one kind byte, then msgpack by msgspec. Never pickle.

Arrays travel as their bytes with the type of their numbers behind them, and a prompt in a frame of
its own, four bytes a token: both ends would spend more on turning numbers into objects and back
than on the rest of a message.
Only the server's two processes import this; `LLM` passes the same objects by reference.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from manyroots.config import EngineSettings
from manyroots.messages import (
    Abort,
    Batch,
    Control,
    EngineInfo,
    LoadLora,
    Submit,
    UnloadLora,
)
from manyroots.progress import Progress

TOKEN_TYPE = "i"
"""As `array` calls a 32-bit integer."""


class MessageKind(enum.Enum):
    """The first frame of every message."""

    SETTINGS = b"s"
    SUBMIT = b"r"
    ABORT = b"a"
    LOAD = b"l"
    UNLOAD = b"u"
    CONTROL = b"c"
    CLOSE = b"q"
    PROGRESS = b"p"
    READY = b"i"
    BEGUN = b"g"
    BATCH = b"b"
    FAILED = b"f"


_TYPES: dict[MessageKind, Any] = {
    MessageKind.SETTINGS: EngineSettings,
    MessageKind.SUBMIT: Submit,
    MessageKind.ABORT: Abort,
    MessageKind.LOAD: LoadLora,
    MessageKind.UNLOAD: UnloadLora,
    MessageKind.CONTROL: Control,
    MessageKind.CLOSE: None,
    MessageKind.PROGRESS: Progress,
    MessageKind.READY: EngineInfo,
    MessageKind.BEGUN: list[int],
    MessageKind.BATCH: Batch,
    MessageKind.FAILED: str,
}


def encode(kind: MessageKind, body: object) -> list[bytes]:
    if isinstance(body, Submit):
        prompt = array(TOKEN_TYPE, body.prompt).tobytes()
        return [kind.value, _ENCODER.encode(replace(body, prompt=())), prompt]
    return [kind.value, _ENCODER.encode(body)]


def decode(frames: list[bytes]) -> tuple[MessageKind, Any]:
    kind = MessageKind(frames[0])
    body = _DECODERS[kind].decode(frames[1])
    if isinstance(body, Submit):
        body = replace(body, prompt=array(TOKEN_TYPE, frames[2]))
    return kind, body


def _to_bytes(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        data: bytes = value.tobytes() + value.dtype.char.encode()
        return data
    raise TypeError(f"{type(value).__name__} can't cross between processes")


def _from_bytes(kind: Any, value: bytes) -> Any:
    """An array, whatever the annotation says of its numbers: what that looks like here depends on
    the version of numpy."""
    dtype = np.dtype(chr(value[-1]))
    return np.frombuffer(value, dtype, count=(len(value) - 1) // dtype.itemsize)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_bytes)
_DECODERS = {
    kind: msgspec.msgpack.Decoder(type_, dec_hook=_from_bytes) for kind, type_ in _TYPES.items()
}
