"""What crosses between a client and the engine: plain data, no behaviour.

The same objects are passed by reference inside one process (`LLM`) and encoded with msgspec
between two (the server); this file imports neither.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from manyroots.ids import AdapterName, Namespace, RequestId
from manyroots.sampling import SamplingParams
from manyroots.step import Int32s, TokenLogprobs

Int64s = npt.NDArray[np.int64]


class FinishReason(enum.Enum):
    """Why a sequence ended; the values are the API's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Submit:
    """One sequence to generate. A request for n completions is n of these."""

    request_id: RequestId
    prompt: Sequence[int]
    """Token ids. An `array('i')` is taken as it is; a list costs its conversion."""
    namespace: Namespace
    sampling: SamplingParams
    seed: int
    """Unsigned 64-bit; drawn at the door for requests that bring none."""
    stop_ids: tuple[int, ...]
    """End-of-sequence tokens (unless ignored) and the caller's stop_token_ids."""
    adapter: AdapterName | None = None
    """What the adapter was called; the engine looks up what that means now, and puts its content
    into the namespace. None is the base model, as the namespace then says too."""
    priority: int = 0
    """With the priority policy: lower begins first."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop these sequences and free what they hold; unknown or finished ones are ignored."""

    request_ids: list[RequestId]


@dataclass(slots=True)
class Output:
    """News of one sequence. Not frozen, because a step makes hundreds; nobody changes one that
    has been handed on."""

    request_id: RequestId
    tokens: list[int]
    """New tokens since the last Output. A stop token is included, as the last one."""
    finish_reason: FinishReason | None
    num_cached_tokens: int
    """Prompt tokens whose keys and values were reused."""
    stop_token: int | None = None
    """The member of `stop_ids` that ended the sequence, if one did."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per new token, where asked for."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """With the first tokens: one per prompt token but the first, where asked for."""
    error: str | None = None
    """With FinishReason.ERROR: what went wrong."""


@dataclass(slots=True)
class Tokens:
    """One new token for each of many sequences that have no other news, column by column."""

    request_ids: Int64s
    tokens: Int32s
    num_cached_tokens: Int32s
    """As in `Output`."""


@dataclass(slots=True)
class News:
    """News of many sequences, each named at most once. Reads as a sequence of `Output`s; those of
    `tokens` are made as they are read, which is the reader's time and not the engine's."""

    outputs: list[Output]
    tokens: Tokens | None = None

    def __iter__(self) -> Iterator[Output]:
        if self.tokens is not None:
            columns = (self.tokens.request_ids, self.tokens.tokens, self.tokens.num_cached_tokens)
            for request_id, token, num_cached in zip(*(c.tolist() for c in columns), strict=True):
                yield Output(request_id, [token], None, num_cached)
        yield from self.outputs

    def __len__(self) -> int:
        return len(self.outputs) + (0 if self.tokens is None else len(self.tokens.tokens))


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the door needs to know of the engine to refuse what can't be served."""

    model_path: str
    """Folder or file the weights came from (after any download)."""
    model_name: str
    """Name for the API where the user gave none."""
    vocab_size: int
    max_model_len: int
    page_size: int
    num_pages: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts for the metrics page; totals since start unless the name says otherwise."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    """Reusable pages that no request holds now."""
    num_held_pages: int
    total_retractions: int
    total_lookup_tokens: int
    """Prompt tokens looked up in the prefix cache."""
    total_hit_tokens: int
    total_steps: int
    total_step_tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything the engine says after one step."""

    news: News
    stats: Stats
