"""How messages cross between processes: one kind byte, then msgpack by msgspec. Never pickle.

Only the server's two processes import this; `LLM` passes the same objects by reference.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from manyroots.config import EngineSettings
from manyroots.messages import Abort, Batch, EngineInfo, LoadLora, Submit, UnloadLora


class Kind(enum.Enum):
    """The first frame of every message."""

    SETTINGS = b"s"
    SUBMIT = b"r"
    ABORT = b"a"
    LOAD = b"l"
    UNLOAD = b"u"
    CLOSE = b"q"
    READY = b"i"
    BATCH = b"b"
    FAILED = b"f"


_TYPES: dict[Kind, Any] = {
    Kind.SETTINGS: EngineSettings,
    Kind.SUBMIT: Submit,
    Kind.ABORT: Abort,
    Kind.LOAD: LoadLora,
    Kind.UNLOAD: UnloadLora,
    Kind.CLOSE: None,
    Kind.READY: EngineInfo,
    Kind.BATCH: Batch,
    Kind.FAILED: str,
}
_DECODERS = {kind: msgspec.msgpack.Decoder(type_) for kind, type_ in _TYPES.items()}
_ENCODER = msgspec.msgpack.Encoder()


def encode(kind: Kind, body: object) -> list[bytes]:
    return [kind.value, _ENCODER.encode(body)]


def decode(frames: list[bytes]) -> tuple[Kind, Any]:
    kind = Kind(frames[0])
    return kind, _DECODERS[kind].decode(frames[1])
