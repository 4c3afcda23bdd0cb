"""What an engine shows of itself at one moment: plain data for the page, no behaviour.

Holds no prompt, no token and no salt: tenants are numbers, adapters are names, pages are counts.
Rows of tables are tuples, because a snapshot may have thousands; they travel as arrays.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from manyroots.messages import Stats

MAX_STEPS = 500
"""Steps that the ring of an engine remembers and the page shows."""
MAX_NODES = 10_000
"""Nodes of the prefix tree that a snapshot lists; the smallest others are counted together."""
MAX_REQUESTS = 2_000
"""Requests that a snapshot lists, the oldest first."""
BASE_MODEL = -1
"""In place of an adapter's number."""


class WaitReason(enum.Enum):
    """What a request that does not compute waits for."""

    NOTHING = ""
    MEMORY = "memory"
    ADAPTER = "adapter"
    LOAD = "load"
    GRAMMAR = "grammar"
    BUDGET = "budget"
    PRIORITY = "priority"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class SnapshotAsk:
    """Answered by a `Snapshot`."""

    op_id: int
    """Chosen by the client; the answer carries it."""
    since_step: int = 0
    """Steps after this one are listed."""
    wants_tree: bool = False
    explain_step: int | None = None
    """This step is explained row by row."""


class StepView(NamedTuple):
    """One step of the ring."""

    step_id: int
    at_s: float
    """When it was launched, since the engine's start."""
    milliseconds: float
    """Its own time: from its launch, or the end of the step before it, to its result. 0 while it
    runs, and for a step that failed."""
    num_rows: int
    num_prompt_tokens: int
    num_decode_tokens: int
    num_draft_tokens: int
    num_arrivals: int
    num_copied_units: int
    num_loads: int
    is_graph: bool
    waits: bool
    """It computes nothing, and waits for a copy or a load."""
    rows_by_adapter: list[tuple[int, int]]
    """(number of the adapter or BASE_MODEL, rows)."""


class StepRow(NamedTuple):
    """One row of a step that is explained."""

    request_id: int
    adapter: int
    num_tokens: int
    num_prompt_tokens: int
    """How many of them are of its prompt."""
    has_arrived: bool
    """It took its row in this step."""


class StepExplained(NamedTuple):
    """One step, row by row."""

    step_id: int
    rows: list[StepRow]
    num_rows: int
    """More than are listed, where the step had more than the ring keeps."""
    copies: list[tuple[str, str, int]]
    """(from tier, to tier, units)."""
    loads: list[tuple[int, str]]
    """(number of the adapter, from tier)."""


class RequestView(NamedTuple):
    """One sequence that is not over."""

    request_id: int
    adapter: str | None
    tenant: int
    """0 without a salt."""
    state: str
    wait: str
    """A `WaitReason`."""
    reason: str
    """The same in words."""
    priority: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_output_tokens: int
    num_cached_tokens: int
    """Reused when it began."""
    num_host_tokens: int
    num_storage_tokens: int
    limit: str
    """Why it reused no more, as `CacheUse.limit`; empty before it has begun."""
    num_pages: int
    """Held now, of the first family of layers."""
    node: int
    """The node of the tree that its path ends in; 0 if none."""


class AdapterView(NamedTuple):
    """One adapter that the engine has read, or that requests still hold."""

    name: str
    digest: str
    """The beginning of it, in hexadecimal."""
    tier: str
    state: str
    """idle, running, loading, paused or waiting."""
    is_pinned: bool
    is_draining: bool
    rank: int
    num_bytes: int
    num_running: int
    num_waiting: int
    num_loads: int
    num_pauses: int
    left: str = ""
    """Why it last left a tier, as `device: evicted for another adapter`; empty if it never did."""
    came_s: tuple[tuple[str, float], ...] = ()
    """How long its last ways took, as (`storage to host`, seconds)."""


class MemoryPart(NamedTuple):
    """A part of one tier's memory; the parts of a tier add up to all that the engine took there."""

    tier: str
    kind: str
    """weights, adapters, pages or states."""
    family: str
    """Of layers; empty for weights and adapters."""
    use: str
    """used, held, cached or free."""
    num_bytes: int
    num_units: int


class NodeView(NamedTuple):
    """A run of pages that every path through it shares."""

    node: int
    parent: int
    """0 is the root."""
    namespace: int
    num_pages: int
    units: list[int]
    """By plane: how many of its pages have a unit there."""
    last_used: int
    """By the count of uses of the cache; of an inner node, see its children too."""
    hits: int
    """Requests that resumed from here."""
    is_fork: bool
    num_nodes: int
    """1; more where small nodes are counted together."""
    marks: list[int]
    """Where a window or a state is kept: (plane, first page, end), one after the other."""


class PlaneView(NamedTuple):
    """One family of layers on one tier."""

    family: str
    kind: str
    """full, window or state."""
    tier: str
    num_units: int
    num_free: int
    num_cached: int
    num_held: int


class NamespaceView(NamedTuple):
    """Whose pages they are."""

    number: int
    adapter: str | None
    """None is the base model; of content that no name leads to, the beginning of its digest."""
    tenant: int


@dataclass(frozen=True, slots=True)
class TreeView:
    """The prefix tree, bounded."""

    page_size: int
    tick: int
    """The newest use of the cache."""
    planes: list[PlaneView]
    namespaces: list[NamespaceView]
    nodes: list[NodeView]
    next_evicted: list[tuple[int, int]]
    """(node, pages) in the order in which cached pages would go, as far ahead as was looked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One of the engines of a gateway."""

    number: int
    is_up: bool
    is_drained: bool
    """It does not answer, and gets no requests until it does."""
    is_leaving: bool
    """It gets no new requests, and ends when it has none."""
    num_open: int
    """Requests that it has now."""
    num_requests: int
    """Requests that it was given since the gateway started."""
    num_running: int
    num_waiting: int
    page_usage: float
    """Share of its pages that requests hold."""
    num_restarts: int
    pid: int | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at one moment."""

    op_id: int
    stats: Stats
    cpu_s: float
    """Processor time that this and the last encoding took: what looking costs the engine."""
    is_paused: bool
    num_requests: int
    """All that are not over; `requests` may list fewer."""
    requests: list[RequestView]
    adapters: list[AdapterView]
    adapter_names: dict[int, str]
    """Of the numbers in `steps`."""
    memory: list[MemoryPart]
    steps: list[StepView]
    settings: dict[str, int] = field(default_factory=dict)
    """Sizes that a simulation of this engine needs."""
    tree: TreeView | None = None
    explained: StepExplained | None = None
