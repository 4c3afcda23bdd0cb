"""One sequence as the scheduler sees it: what is known, what is computed, what it holds.

Progress is a counter, not a phase: computed tokens catch up with known tokens. Prefill, chunked
prefill, decode, reuse and resuming after a retraction differ only in how far apart the two are.

    tokens     |-------- prompt --------|--- output ---|  pending
    computed   |==== KV in pages or under way ====>
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

from manyroots.cache.cache import Ending
from manyroots.cache.keys import PrefixKey
from manyroots.cache.lease import Lease
from manyroots.cache.prefetch import Ticket
from manyroots.ids import Namespace, Row, StepId
from manyroots.lora.registry import Hold
from manyroots.messages import Submit
from manyroots.sampling import MAX_TOKENS_LIMIT
from manyroots.step import Int32s, TokenLogprobs

NEVER = 2**31 - 1
"""A position that no sequence reaches."""


class State(enum.Enum):
    """Where a sequence is; each state owns what it holds."""

    FETCHING = "fetching"
    """Not in the queue yet: storage has been asked for its prefix."""
    WAITING = "waiting"
    """In the queue; holds nothing."""
    LOADING = "loading"
    """Holds a lease whose units are on their way to the device."""
    RUNNING = "running"
    """Holds a row and a lease."""
    DRAINING = "draining"
    """Finished, but a launched step still writes to its pages; holds a row and a lease."""
    FINISHED = "finished"
    """Holds nothing."""


class Request:
    """A sequence and its progress. Only the scheduler changes it."""

    __slots__ = (
        "_buffer",
        "adapter_from",
        "ending",
        "group",
        "hold",
        "key",
        "lease",
        "max_num_tokens",
        "num_cached_tokens",
        "num_committed_tokens",
        "num_computed_tokens",
        "num_in_flight",
        "num_pending_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "prompt_logprobs",
        "row",
        "serial",
        "state",
        "stop_ids",
        "submit",
        "ticket",
        "waiting_since",
    )

    def __init__(
        self, submit: Submit, serial: int, step_id: StepId, hold: Hold | None, page_size: int
    ) -> None:
        self.submit = submit
        self.serial = serial
        """Order of arrival."""
        self.waiting_since = step_id
        """The step being planned when it was queued."""
        self.hold = hold
        """Its right to its adapter's weights, from submission to its end."""
        namespace = submit.namespace
        if hold is not None:
            # What the adapter's name means now, not what it meant to whoever sent the request.
            namespace = Namespace(adapter=hold.digest, salt=namespace.salt)
        self.adapter_from = 0
        """The first position that its adapter computes."""
        self.key = PrefixKey(namespace)
        if hold is not None and hold.version.invocation_tokens is not None:
            self.adapter_from = invoked_at(submit.prompt, hold.version.invocation_tokens)
            base = Namespace(adapter=None, salt=namespace.salt)
            self.key = PrefixKey.activated(base, namespace, self.adapter_from, page_size)
        self.group = (None if hold is None else hold.digest, namespace.salt)
        """Adapter and tenant."""
        self.stop_ids = frozenset(submit.stop_ids)
        self.state = State.WAITING
        self.num_prompt_tokens = len(submit.prompt)
        self.num_tokens = self.num_prompt_tokens
        max_tokens = submit.sampling.max_tokens
        self.max_num_tokens = self.num_tokens + (
            MAX_TOKENS_LIMIT if max_tokens is None else max_tokens
        )
        """Prompt and output at their longest."""
        self._buffer = np.array(submit.prompt, np.int32)
        self.num_computed_tokens = 0
        """Tokens whose keys and values are in pages once every launched step is done."""
        self.num_committed_tokens = 0
        """The same, once every step that is done is counted."""
        self.num_pending_tokens = 0
        """Tokens that launched steps will sample."""
        self.num_in_flight = 0
        """Launched steps that this sequence is part of."""
        self.num_cached_tokens: int | None = None
        """What was reused when it first began."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.ending = Ending.DROPPED
        """What its lease is released with: whether its newest state is worth keeping."""
        self.row: Row | None = None
        self.lease: Lease | None = None
        self.ticket: Ticket | None = None
        """What it asked storage for."""

    @property
    def tokens(self) -> Int32s:
        """Prompt and output so far."""
        return self._buffer[: self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_tokens_to_compute(self) -> int:
        """How far computed tokens are behind known and pending ones."""
        return self.num_tokens + self.num_pending_tokens - self.num_computed_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.submit.sampling.prompt_logprobs is not None and self.num_output_tokens == 0

    def append(self, token: int) -> None:
        if self.num_tokens == len(self._buffer):
            grown = np.empty(max(64, 2 * len(self._buffer)), np.int32)
            grown[: self.num_tokens] = self.tokens
            self._buffer = grown
        self._buffer[self.num_tokens] = token
        self.num_tokens += 1


def invoked_at(prompt: Sequence[int], invocation: tuple[int, ...]) -> int:
    """Where an aLoRA begins to act: at the last place where its invocation tokens stand whole.

    NEVER if they do not: the base model answers, as PEFT has it.
    """
    size = len(invocation)
    for start in range(len(prompt) - size, -1, -1):
        if tuple(prompt[start : start + size]) == invocation:
            return start
    return NEVER
