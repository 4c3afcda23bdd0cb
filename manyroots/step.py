"""The contract between the two halves: a frozen `Plan` goes down, a `StepResult` comes up.

The decide half (scheduler, cache) makes plans without ever touching a tensor; the execute half
(runner) carries them out in order and knows nothing of queues or reuse. The runner keeps a
persistent batch: a sequence arrives once, on a row, and later plans say only what changed.

Within one step a runner writes the keys and values of *all* rows before any row attends, layer
by layer. A plan may therefore let one row read pages that another row fills in the same step.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NewType, Protocol

import numpy as np
import numpy.typing as npt

from manyroots.ids import AdapterDigest, AdapterSlot, CopyId, RequestId, Row, StepId, Tier
from manyroots.sampling import SamplingParams

Int32s = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]

MAX_STEP_DRAFT_TOKENS = 64
"""Guesses that one step may check, of all its rows: a sampler keeps room for so many positions."""

LoadId = NewType("LoadId", int)
"""One load from the intent to its answer; never used again."""


@dataclass(slots=True)
class Arrival:
    """A sequence takes a row of the persistent batch, replacing whatever was there.

    Part of a plan, and as frozen; a burst makes hundreds, and freezing each would cost most.
    """

    row: Row
    request_id: RequestId
    tokens: Int32s
    """Every token known so far: the prompt, and after a retraction the output too."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """How many of `tokens` already have their keys and values in the pages below."""
    page_tables: tuple[Int32s, ...]
    """One table per cache family, in the order of the engine's family list."""
    sampling: SamplingParams
    seed: int
    """Draw number i of this sequence depends on (seed, i) alone."""
    stop_ids: tuple[int, ...]
    """Tokens that end the sequence; not sampled before `sampling.min_tokens`."""
    adapter_slot: AdapterSlot | None
    """Where the weights of its adapter are while the row lives; None is the base model."""
    adapter_from: int
    """The first position that its adapter computes: 0, or where an aLoRA is invoked."""


@dataclass(slots=True)
class NewPages:
    """Pages that continue rows' tables of one family, column by column. Not frozen, as `Plan`.

    Page i becomes entry `places[i]` of the table of row `rows[i]`. Those of one row are in order,
    and the first of them is where its table ended.
    """

    family: int
    rows: Int32s
    places: Int32s
    pages: Int32s


@dataclass(frozen=True, slots=True)
class Copy:
    """Units of one family to be copied, element by element.

    Within the device (a state saved or restored) a copy is part of the step and done when the
    step is. Between tiers it runs beside the steps, and its end is told by a `CopyDone` in some
    later result; until then both ends stay as they are. No step reads a unit on its way, but for
    the one whose plan brings it and says so.
    """

    copy_id: CopyId
    family: int
    source: Tier
    target: Tier
    source_units: Int32s
    """Empty where the source is storage, which knows units by hash."""
    target_units: Int32s
    """Empty where the target is storage."""
    hashes: tuple[bytes, ...] = ()
    """With storage at one end: the page's hash for each unit."""
    is_after_model: bool = False
    """Copies run before the model computes, but for states saved at a step's end."""
    is_overlapped: bool = False
    """Of pages from the host: this plan's rows read them, each layer when its part is there. If
    they do not arrive the step fails (T10)."""


@dataclass(frozen=True, slots=True)
class CopyDone:
    """A copy between tiers has ended."""

    copy_id: CopyId
    arrived: Bools
    """For each unit, whether it is there whole."""
    error: str | None = None
    """Why the tier could not be read or written at all; None where it answered. Then what did not
    arrive is not there, or not whole."""
    seconds: float = 0.0
    """How long the copy itself took; 0 where it was not measured."""


@dataclass(frozen=True, slots=True)
class KeepStored:
    """Storage is to evict these pages, of all families, after others. A hint: it has no end to
    tell, and is dropped where storage is too slow for it."""

    hashes: bytes
    """One after the other: a plan must not take time for each page."""
    for_s: float
    """From now on; 0 ends what was asked before."""


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A slot as one owner has it. The next owner's generation is higher."""

    slot: AdapterSlot
    generation: int


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Bring these weights into a device slot, in place of whatever is there; or only as far as
    host memory, while no slot can be had.

    From storage they pass through host memory and stay there. What was read must have this digest:
    the files may have changed since the adapter was registered.
    """

    load_id: LoadId
    digest: AdapterDigest
    source: Tier
    """HOST or STORAGE."""
    target: SlotRef | None
    """None: as far as host memory, from STORAGE."""
    path: str
    """Where storage has the files."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Give back what one tier has of these weights; nothing to do if it has none.

    DEVICE: only if the slot's generation is still `target`'s. Never STORAGE, whose files are the
    user's.
    """

    digest: AdapterDigest
    tier: Tier
    target: SlotRef | None = None
    """With DEVICE alone."""


AdapterIntent = LoadAdapter | DropAdapter


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """A load is over; nothing writes to its slot, if it has one, any more."""

    load_id: LoadId
    error: str | None
    """None if the weights are where they were wanted; else why not, for the caller to read."""
    seconds: float = field(default=0.0, compare=False)
    """How long the load itself took; 0 where it was not measured."""


@dataclass(frozen=True, slots=True)
class RowDraft:
    """Guessed tokens of one row, computed after its known ones and checked by the same step.

    Each position is sampled from its own logits, with the random number of its index. A guess is
    accepted while it equals the token sampled at its position; what follows is void.
    """

    row: Row
    tokens: Int32s
    """At least one. None of them ends the sequence."""


@dataclass(slots=True)
class Plan:
    """One forward pass: which rows arrive, which tables grow, how many tokens each row computes.
    Nothing changes it. It is not frozen, because making a frozen one takes 6 us longer.

    A plan without rows only starts copies; one that `waits` asks the runner to come back as soon
    as any copy has ended, since nothing can be computed before.
    """

    step_id: StepId
    arrivals: tuple[Arrival, ...]
    new_pages: tuple[NewPages, ...]
    """Any number for a family, of different rows."""
    rows: Int32s
    """Rows that compute in this step, each at most once."""
    num_tokens: Int32s
    """For each of `rows`, how many tokens it computes next, its draft included."""
    samples: Bools
    """For each of `rows`, whether its last computed position yields a new token."""
    drafts: tuple[RowDraft, ...] = ()
    """Of some rows that sample. No plan is launched between such a plan and its result. Then a row
    has computed its known tokens and the accepted guesses. A row with a recurrent state, of which
    a guess was wrong, has computed nothing in this step: its state is what it was before."""
    num_guesses: int = 0
    """How many tokens the model's prediction layer guesses after each sampled one."""
    copies: tuple[Copy, ...] = ()
    keeps: tuple[KeepStored, ...] = ()
    """Carried out after what is being written to storage, these copies included."""
    adapters: tuple[AdapterIntent, ...] = ()
    """Carried out in this order. A slot named in a load is used by no launched step, and no step
    uses it before the load's answer."""
    waits: bool = False
    lent_units: tuple[int, ...] = ()
    """Units of the first family whose memory adapters use from now on. Nothing reads what they
    held: no step after those launched before this one, and no copy."""

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token itself, then the likeliest alternatives."""

    token: int
    logprob: float
    rank: int
    """1 is the likeliest token."""
    top_tokens: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RowFault:
    """One row whose computation gave nothing usable; the other rows of the step are good."""

    row: Row
    reason: str
    is_of_request: bool = False
    """What the request asks for can't be done; else the fault is the engine's."""


@dataclass(frozen=True, slots=True)
class FirstRun:
    """Something that a step had to wait for, because the engine's start did not make it."""

    kind: str
    """`kernel` or `graph`."""
    name: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave."""

    step_id: StepId
    tokens: Int32s
    """One token per sampling row, in the order of the plan: the newest of its tokens."""
    num_accepted: dict[Row, int] = field(default_factory=dict)
    """For rows with a draft, how many of its tokens come before the one in `tokens`."""
    guesses: dict[Row, Int32s] = field(default_factory=dict)
    """For some sampling rows, if the plan asks: tokens that may follow the newest one."""
    draft_logprobs: dict[Row, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """For rows with a draft that asked for logprobs: those of the accepted tokens."""
    logprobs: dict[Row, TokenLogprobs] = field(default_factory=dict)
    """For sampling rows that asked for them."""
    prompt_logprobs: dict[Row, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """For rows that asked: positions this step computed, each scoring the *next* prompt token."""
    hidden: dict[Row, Floats] = field(default_factory=dict)
    """For sampling rows that asked: the hidden state that the token was sampled from."""
    faults: tuple[RowFault, ...] = ()
    copies: tuple[CopyDone, ...] = ()
    """Copies between tiers that have ended since the last result."""
    adapters: tuple[AdapterLoaded, ...] = ()
    """Loads that have ended since the last result, in any order."""
    seconds: float = 0.0
    """How long the model computed; 0 where it was not measured."""
    is_graph: bool = False
    """Whether a captured graph computed it, and not kernel by kernel."""
    first_runs: tuple[FirstRun, ...] = ()
    """What was compiled or captured for it."""


class Runner(Protocol):
    """Carries out plans, in the order they are launched.

    A step that fails has taken in its arrivals and tables all the same: the step launched after
    it counts on them, and must not write through those of a row's previous owner.
    """

    def launch(self, plan: Plan) -> Future[StepResult]:
        """Queue a plan after those already launched; returns at once."""
        ...

    def close(self) -> None:
        """Wait for what was launched, then give everything back."""
        ...
