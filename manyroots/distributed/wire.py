"""How the first rank and the others speak: one kind, then msgpack by msgspec. Never pickle.

Arrays cross as `arrays.py` has them. Imported only where there is more than one rank.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from manyroots.config import EngineSettings
from manyroots.distributed.arrays import flatten, restore
from manyroots.ids import StepId
from manyroots.step import (
    AdapterLoaded,
    Arrival,
    Bools,
    Copy,
    CopyDone,
    DropAdapter,
    Int32s,
    KeepStored,
    LoadAdapter,
    NewPages,
    Plan,
    RowDraft,
)


class RankMessageKind(enum.Enum):
    """What a message is."""

    # from the first rank
    JOIN = b"j"
    START = b"s"
    PLAN = b"p"
    DROP = b"d"
    FORGET = b"g"
    CLOSE = b"q"
    # to the first rank
    LOADED = b"l"
    ADAPTER = b"a"
    COPY = b"c"
    FAILED = b"f"


@dataclass(frozen=True, slots=True)
class Join:
    """The first message to a rank: its number and what to load."""

    rank: int
    size: int
    folder: str
    """Private to this engine; where its ranks meet."""
    settings: EngineSettings


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank has its weights."""

    num_pages: int
    """Of all layers, as many as fit beside them."""
    adapter_room: int
    """What adapters have beside them, in slots or blocks; 0 without --enable-lora."""


@dataclass(frozen=True, slots=True)
class StartSteps:
    """All ranks have their weights: make room for pages, then follow plans."""

    num_units: tuple[int, ...]
    """By family."""
    adapter_room: int
    """What fits on every rank."""
    max_model_len: int


@dataclass(frozen=True, slots=True)
class _Intent:
    """One of the two; msgpack has no way to tell them apart by itself."""

    load: LoadAdapter | None
    drop: DropAdapter | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """A `Plan`, field by field, with its intents told apart."""

    step_id: StepId
    arrivals: tuple[Arrival, ...]
    new_pages: tuple[NewPages, ...]
    rows: Int32s
    num_tokens: Int32s
    samples: Bools
    drafts: tuple[RowDraft, ...]
    num_guesses: int
    copies: tuple[Copy, ...]
    keeps: tuple[KeepStored, ...]
    adapters: tuple[_Intent, ...]
    waits: bool
    lent_units: tuple[int, ...]


_TYPES: dict[RankMessageKind, Any] = {
    RankMessageKind.JOIN: Join,
    RankMessageKind.START: StartSteps,
    RankMessageKind.PLAN: _Plan,
    RankMessageKind.DROP: DropAdapter,
    RankMessageKind.FORGET: tuple[bytes, ...],
    RankMessageKind.CLOSE: None,
    RankMessageKind.LOADED: Loaded,
    RankMessageKind.ADAPTER: AdapterLoaded,
    RankMessageKind.COPY: CopyDone,
    RankMessageKind.FAILED: str,
}
_FIELDS = tuple(field.name for field in fields(_Plan) if field.name != "adapters")


def encode(kind: RankMessageKind, body: object) -> tuple[bytes, bytes]:
    if isinstance(body, Plan):
        body = _to_wire(body)
    return kind.value, _ENCODER.encode(body)


def decode(message: tuple[bytes, bytes]) -> tuple[RankMessageKind, Any]:
    kind = RankMessageKind(message[0])
    body = _DECODERS[kind].decode(message[1])
    return kind, _from_wire(body) if isinstance(body, _Plan) else body


def _to_wire(plan: Plan) -> _Plan:
    intents = tuple(
        _Intent(intent, None) if isinstance(intent, LoadAdapter) else _Intent(None, intent)
        for intent in plan.adapters
    )
    return _Plan(**{name: getattr(plan, name) for name in _FIELDS}, adapters=intents)


def _from_wire(plan: _Plan) -> Plan:
    intents = []
    for intent in plan.adapters:
        one = intent.load or intent.drop
        assert one is not None
        intents.append(one)
    return Plan(**{name: getattr(plan, name) for name in _FIELDS}, adapters=tuple(intents))


_ENCODER = msgspec.msgpack.Encoder(enc_hook=flatten)
_DECODERS = {
    kind: msgspec.msgpack.Decoder(type_, dec_hook=restore) for kind, type_ in _TYPES.items()
}
