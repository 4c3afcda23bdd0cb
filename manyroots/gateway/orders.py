"""What a gateway and the router say to each other, beside the messages of one engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import msgspec

from manyroots.ids import AdapterName, RequestId
from manyroots.messages import LoadLora, Stats
from manyroots.snapshot import ReplicaView


class OrderKind(enum.Enum):
    """What an operator may ask of all replicas."""

    RESET_CACHE = "reset_cache"
    PAUSE = "pause"
    RESUME = "resume"
    UPDATE_WEIGHTS = "update_weights"
    SLEEP = "sleep"
    WAKE = "wake"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class Order:
    """Answered by a `ControlReply`."""

    op_id: int
    kind: OrderKind
    argument: str = ""
    """Of a pause or sleep: its mode. Of other weights: their folder."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A request ends without an answer."""

    request_id: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class Unseen:
    """A look at the engine came to nothing."""

    op_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """A name that takes requests since it was loaded."""

    load: LoadLora
    path: str
    """As it is shown."""


@dataclass(frozen=True, slots=True)
class Names:
    """Names that came or went. Answered by its number when they are in effect."""

    number: int
    added: list[NamedAdapter]
    removed: list[AdapterName]


@dataclass(frozen=True, slots=True)
class Fleet:
    """How the replicas are."""

    replicas: list[ReplicaView]
    stats: Stats | None
    is_alive: bool
    is_paused: bool
    is_asleep: bool
    num_restarts: int
    num_rerouted: int


class LinkKind(enum.Enum):
    """The first frame of these messages. Those of an engine have small letters."""

    ORDER = b"O"
    LOST = b"X"
    NAMES = b"N"
    HEARD = b"H"
    FLEET = b"F"
    UNSEEN = b"U"


_TYPES: dict[LinkKind, Any] = {
    LinkKind.ORDER: Order,
    LinkKind.LOST: Lost,
    LinkKind.NAMES: Names,
    LinkKind.HEARD: int,
    LinkKind.FLEET: Fleet,
    LinkKind.UNSEEN: Unseen,
}
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS = {kind.value: msgspec.msgpack.Decoder(type_) for kind, type_ in _TYPES.items()}


def encode_link(kind: LinkKind, body: object) -> list[bytes]:
    return [kind.value, _ENCODER.encode(body)]


def decode_link(frames: list[bytes]) -> Any:
    """The body, None if the message is one of an engine."""
    decoder = _DECODERS.get(frames[0])
    return None if decoder is None else decoder.decode(frames[1])
