"""One sequence in the scheduler: its known tokens, and what it holds.

Progress is a counter, not a phase: computed tokens catch up with known tokens. Prefill, chunked
prefill, decode, reuse and resuming after a retraction differ only in the distance of the two. While
a request runs, its counters are columns of its row (`rows.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from manyroots.cache.keys import PrefixKey
from manyroots.cache.lease import Lease
from manyroots.cache.outcomes import Ending
from manyroots.ids import Namespace, Row, StepId
from manyroots.lora.registry import Hold
from manyroots.messages import CacheUse, Submit
from manyroots.sampling import MAX_TOKENS_LIMIT
from manyroots.step import Int32s, TokenLogprobs

if TYPE_CHECKING:
    from manyroots.scheduler.draft_gain import DraftProgress

NEVER = 2**31 - 1
"""A position that no sequence reaches."""


class HasRecent(Protocol):
    """Rows, which store sampled tokens for all requests together."""

    def hand_over(self, request: Request) -> None:
        """Give a request its pending tokens."""
        ...


class State(enum.Enum):
    """The state of a sequence; each state owns what it holds."""

    FETCHING = "fetching"
    """Not in the queue yet: storage has been asked for its prefix, or will be (`fetches.py`)."""
    WAITING = "waiting"
    """In the queue; holds only what arrived from storage for it."""
    LOADING = "loading"
    """Holds a lease whose units are being copied to the device."""
    RUNNING = "running"
    """Holds a row and a lease."""
    PAUSED = "paused"
    """Has started and has no row for now; holds a lease (`slices.py`)."""
    DRAINING = "draining"
    """Finished, but a launched step still writes to its pages; holds a row and a lease."""
    FINISHED = "finished"
    """Holds nothing."""


class Request:
    """A sequence and its progress. Only the scheduler changes it."""

    __slots__ = (
        "_buffer",
        "adapter_from",
        "cache_use",
        "draft_progress",
        "ending",
        "group",
        "hold",
        "is_broken",
        "key",
        "known_tokens",
        "lease",
        "max_num_tokens",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_fetched_tokens",
        "num_in_flight_tokens",
        "num_known_tokens",
        "num_prompt_tokens",
        "predicted",
        "prompt_logprobs",
        "row",
        "sampled_by",
        "serial",
        "since",
        "skips_storage",
        "state",
        "stop_ids",
        "submit",
        "tenancy",
        "wants_prompt_logprobs",
    )

    def __init__(
        self, submit: Submit, serial: int, step_id: StepId, hold: Hold | None, page_size: int
    ) -> None:
        self.submit = submit
        self.serial = serial
        """Order of arrival."""
        self.since = step_id
        """The step being planned when it was queued, started or was paused."""
        self.hold = hold
        """Its hold on its adapter's weights, from submission to its end."""
        digest = None if hold is None else hold.digest
        namespace = Namespace(adapter=digest, salt=submit.salt)
        self.adapter_from = 0
        """The first position that its adapter computes."""
        self.key = PrefixKey(namespace)
        if hold is not None and hold.version.spec.invocation_tokens is not None:
            self.adapter_from = invoked_at(submit.prompt, hold.version.spec.invocation_tokens)
            base = Namespace(adapter=None, salt=submit.salt)
            self.key = (
                PrefixKey(base)
                if self.adapter_from == NEVER
                else PrefixKey.activated(base, namespace, self.adapter_from, page_size)
            )
        self.group = (digest, submit.salt)
        """Adapter and tenant."""
        self.stop_ids = frozenset(submit.stop_ids)
        self.state = State.WAITING
        self.num_prompt_tokens = len(submit.prompt)
        self.num_known_tokens = self.num_prompt_tokens
        max_tokens = submit.max_tokens
        if max_tokens is None:
            max_tokens = submit.sampling.max_tokens
        self.max_num_tokens = self.num_prompt_tokens + (
            MAX_TOKENS_LIMIT if max_tokens is None else max_tokens
        )
        """The most tokens of prompt and output."""
        # Never written to: it may be the caller's. The first sampled token moves it to a longer
        # buffer.
        self.known_tokens: Int32s = np.asarray(submit.prompt, np.int32)
        """Like `tokens`, without those that rows still have: all tokens of a request without a row,
        and at a lower cost."""
        self.sampled_by: HasRecent | None = None
        """Rows from which tokens must be fetched: a step gives tokens to all of its rows together.
        None before its first token is planned, and without a row."""
        self._buffer = self.known_tokens
        """The array whose start the tokens are."""
        self.num_in_flight_tokens = 0
        """For a request that lost its row: tokens that launched steps still compute for it."""
        self.num_computed_tokens = 0
        """For a paused request: where it resumes."""
        self.num_cached_tokens: int | None = None
        """The reused tokens when it first started."""
        self.cache_use: CacheUse | None = None
        """The same in detail, until its caller has received it."""
        self.num_fetched_tokens = 0
        """The tokens that storage was found to have."""
        self.skips_storage = False
        """Storage may have more of it but was not asked, because it is slow or failing."""
        self.wants_prompt_logprobs = submit.sampling.prompt_logprobs is not None
        """Until its first token is sampled."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.ending = Ending.DROPPED
        """How its lease is released: which of its states are worth keeping."""
        self.is_broken = False
        """A step computed an unusable part of it: its pages must not be published."""
        self.draft_progress: DraftProgress | None = None
        """The gain of guesses; None before the first."""
        self.predicted: tuple[int, Int32s] | None = None
        """The newest guesses of the model's prediction layer, after this many tokens."""
        self.num_draft_tokens = 0
        """Guessed for it and checked by steps."""
        self.num_accepted_tokens = 0
        """How many of those were right."""
        self.row: Row | None = None
        self.tenancy = 0
        """Its newest tenancy of a row, by number."""
        self.lease: Lease | None = None

    @property
    def tokens(self) -> Int32s:
        """Prompt and output so far, of an unfinished request. Existing entries never change, so
        others may keep a reference."""
        if self.sampled_by is not None:
            self.sampled_by.hand_over(self)
        return self.known_tokens

    @property
    def num_tokens(self) -> int:
        """The number of these tokens."""
        if self.sampled_by is not None:
            self.sampled_by.hand_over(self)
        return self.num_known_tokens

    def extend(self, tokens: Int32s) -> None:
        """Tokens were sampled."""
        count = self.num_known_tokens
        end = count + len(tokens)
        if end > len(self._buffer):
            grown = np.empty(max(end, count + count // 4 + 64), np.int32)
            grown[:count] = self.known_tokens
            self._buffer = grown
        self._buffer[count:end] = tokens
        self.known_tokens = self._buffer[:end]
        self.num_known_tokens = end
        self.wants_prompt_logprobs = False


def invoked_at(prompt: Sequence[int] | Int32s, invocation: tuple[int, ...]) -> int:
    """Where an aLoRA starts: the last position at which all of its invocation tokens occur.

    NEVER if they do not occur: the base model answers, as in PEFT.
    """
    tokens = np.asarray(prompt, np.int32)
    num_places = len(tokens) - len(invocation) + 1
    if num_places < 1:
        return NEVER
    is_there = np.ones(num_places, np.bool_)
    for offset, token in enumerate(invocation):
        is_there &= tokens[offset : offset + num_places] == token
    starts = is_there.nonzero()[0]
    return int(starts[-1]) if len(starts) else NEVER
