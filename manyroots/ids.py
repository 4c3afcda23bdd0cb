"""Identities. Each is a type of its own, looked up once by the input processor and passed on
unchanged.

Knows nothing of tensors, HTTP or text.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", int)
"""One sequence inside the engine. Always the server's own number, never a caller's string."""

StepId = NewType("StepId", int)
"""Number of a forward pass; steps run in this order."""

Row = NewType("Row", int)
"""Index of a sequence in the runner's persistent batch."""

CopyId = NewType("CopyId", int)
"""One transfer of units between tiers, from its intent to its acknowledgement."""

HASH_BYTES = 32
"""Of the hash of a page."""

AdapterName = NewType("AdapterName", str)
"""What users call an adapter. The same name may mean other weights after a reload."""

AdapterDigest = NewType("AdapterDigest", bytes)
"""Content digest of an adapter's weights and config."""

REVISION_DIGITS = 12
"""Of a digest, in hexadecimal: what a revision of an adapter is called."""

AdapterSlot = NewType("AdapterSlot", int)
"""Index of a place for one adapter's weights on the device."""
NO_ADAPTER = -1
"""In an array of slots: tokens that the base model computes alone."""


class Tier(enum.Enum):
    """Where bytes live."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class Namespace(NamedTuple):
    """Whose weights computed a page, and for which tenant.

    Both fields are always spelled out: forgetting one is a type error, never the base model. A
    tuple, because the prefix tree hashes one for every node that it passes.
    """

    adapter: AdapterDigest | None
    """None is the base model's own weights."""
    salt: str | None
    """A tenant's cache salt. None (no salt) and "" are different namespaces."""
