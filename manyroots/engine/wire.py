"""Encodes messages between processes: one kind byte, then msgpack by msgspec. Never pickle.

Arrays travel as their type and their bytes. A prompt has its own frame with four bytes a token:
converting numbers to objects and back would cost more than the rest of a message. Sequences of one
request share their sampling parameters, which may be a megabyte: they are sent once
(`SubmitWriter`, `SubmitReader`). Only the server's two processes import this; `LLM` passes the same
objects by reference.
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
from manyroots.process.progress import Progress
from manyroots.sampling import SamplingParams
from manyroots.snapshot import Snapshot, SnapshotAsk

NUM_KEPT = 16
"""Sampling parameters that a connection keeps: for this many concurrent requests."""
TOKEN_TYPE = "i"
"""`array`'s code for a 32-bit integer."""


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
    """Every message but SUBMIT, which a `SubmitWriter` encodes."""
    assert kind is not MessageKind.SUBMIT
    return [kind.value, _ENCODER.encode(body)]


def decode(frames: list[bytes]) -> tuple[MessageKind, Any]:
    kind = MessageKind(frames[0])
    return kind, _DECODERS[kind].decode(frames[1])


class SubmitWriter:
    """Encodes the submissions of one connection. Both ends keep the last sampling parameters under
    the same indexes; known parameters are sent as an index."""

    def __init__(self) -> None:
        self._kept: list[SamplingParams | None] = [None] * NUM_KEPT
        self._next = 0

    def encode(self, submit: Submit) -> list[bytes]:
        sampling, shared = submit.sampling, b""
        place = next((i for i, kept in enumerate(self._kept) if kept is sampling), None)
        if place is None:
            place, self._next = self._next, (self._next + 1) % NUM_KEPT
            self._kept[place] = sampling
            shared = _ENCODER.encode(sampling)
        prompt = array(TOKEN_TYPE, submit.prompt).tobytes()
        plain = _ENCODER.encode(replace(submit, prompt=(), sampling=_PLAIN))
        return [MessageKind.SUBMIT.value, plain, prompt, bytes([place]), shared]


class SubmitReader:
    """The other end of a `SubmitWriter`."""

    def __init__(self) -> None:
        self._kept: list[SamplingParams] = [_PLAIN] * NUM_KEPT

    def decode(self, frames: list[bytes]) -> Submit:
        _, plain, prompt, [place], shared = frames
        if shared:
            self._kept[place] = _SAMPLING_DECODER.decode(shared)
        submit: Submit = _DECODERS[MessageKind.SUBMIT].decode(plain)
        return replace(submit, prompt=array(TOKEN_TYPE, prompt), sampling=self._kept[place])


_PLAIN = SamplingParams()
_SAMPLING_DECODER = msgspec.msgpack.Decoder(SamplingParams, dec_hook=restore)
_ENCODER = msgspec.msgpack.Encoder(enc_hook=flatten)
_DECODERS = {
    kind: msgspec.msgpack.Decoder(type_, dec_hook=restore) for kind, type_ in _TYPES.items()
}
