"""How messages cross between processes: one kind byte, then msgpack by msgspec. Never pickle.

Arrays travel as their type and their bytes, and a prompt in a frame of its own, four bytes a token:
both ends would spend more on turning numbers into objects and back than on the rest of a message.
Only the server's two processes import this; `LLM` passes the same objects by reference.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import replace
from typing import Any

import msgspec

from manyroots.config import EngineSettings
from manyroots.distributed.arrays import flatten, restore
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
from manyroots.snapshot import Snapshot, SnapshotAsk

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
    SNAPSHOT = b"n"
    CLOSE = b"q"
    PROGRESS = b"p"
    READY = b"i"
    BEGUN = b"g"
    BATCH = b"b"
    SEEN = b"v"
    FAILED = b"f"


_TYPES: dict[MessageKind, Any] = {
    MessageKind.SETTINGS: EngineSettings,
    MessageKind.SUBMIT: Submit,
    MessageKind.ABORT: Abort,
    MessageKind.LOAD: LoadLora,
    MessageKind.UNLOAD: UnloadLora,
    MessageKind.CONTROL: Control,
    MessageKind.SNAPSHOT: SnapshotAsk,
    MessageKind.CLOSE: None,
    MessageKind.PROGRESS: Progress,
    MessageKind.READY: EngineInfo,
    MessageKind.BEGUN: list[int],
    MessageKind.BATCH: Batch,
    MessageKind.SEEN: Snapshot,
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


_ENCODER = msgspec.msgpack.Encoder(enc_hook=flatten)
_DECODERS = {
    kind: msgspec.msgpack.Decoder(type_, dec_hook=restore) for kind, type_ in _TYPES.items()
}
