"""What crosses between a client and the engine: plain data, no behaviour.

The same objects are passed by reference inside one process (`LLM`) and encoded with msgspec
between two (the server); this file imports neither.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from manyroots.ids import AdapterDigest, AdapterName, RequestId, Tier
from manyroots.sampling import SamplingParams
from manyroots.step import Bools, Int32s, TokenLogprobs

Int64s = npt.NDArray[np.int64]


class FinishReason(enum.Enum):
    """Why a sequence ended; the values are the API's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class KeepRange:
    """Keep a prompt up to a token."""

    until_token: int
    priority: int = 50
    """0 to 100; the higher, the longer it stays where marks compete."""
    for_s: float = 300.0
    """Counted from the end of the request."""


@dataclass(frozen=True, slots=True)
class Retention:
    """What a request asks the cache to keep (T13)."""

    ranges: tuple[KeepRange, ...]
    tenant: str | None
    """Whose share of the memory the marks count against; None is everything without a key."""
    share: float
    """Of the pool: what all marks of the tenant may cover."""


@dataclass(frozen=True, slots=True)
class Submit:
    """One sequence to generate. A request for n completions is n of these."""

    request_id: RequestId
    prompt: Sequence[int]
    """Token ids. An `array('i')` is taken as it is; a list costs its conversion."""
    salt: str | None
    """The tenant's part of the namespace; the engine adds the adapter's content."""
    sampling: SamplingParams
    seed: int
    """Unsigned 64-bit; drawn by the input processor for requests that bring none."""
    stop_ids: tuple[int, ...]
    """End-of-sequence tokens (unless ignored) and the caller's stop_token_ids."""
    adapter: AdapterName | None
    """Never left out (N10). Its name, perhaps with `@` and a revision; the engine looks up what
    that means now. None is the base model."""
    priority: int = 0
    """With the priority policy: the lower, the more important. 0 with every other."""
    max_tokens: int | None = None
    """Most tokens of the output where the sampling leaves it open, or says more than is left of
    the context. Here, so that all sequences of a request share one `sampling`."""
    retention: Retention | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop these sequences and free what they hold; unknown or finished ones are ignored."""

    request_ids: list[RequestId]


@dataclass(frozen=True, slots=True)
class LoadLora:
    """Read an adapter's files and take requests for its name. Answered by a `LoraReply`."""

    op_id: int
    """Chosen by the client; the reply carries it."""
    name: AdapterName
    path: str
    is_pinned: bool = False
    """Its slot on the device is never given to another."""
    in_place: bool = False
    """The name may have other content already, which drains."""
    is_upload: bool = False
    """The server itself has put the files there."""


@dataclass(frozen=True, slots=True)
class PublishLora:
    """Give a name the content of an adapter in this process's memory; what it meant before drains.
    Answered by a `LoraReply`. Never crosses between processes."""

    op_id: int
    name: AdapterName
    adapter: object
    """A `lora.files.memory.MemoryAdapter`."""
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class UnloadLora:
    """Take no new requests for a name; free what its running ones do not hold."""

    op_id: int
    name: AdapterName


class ControlKind(enum.Enum):
    """What an operator may ask of the whole engine."""

    RESET_CACHE = "reset_cache"
    """Forget what can be reused."""
    PAUSE = "pause"
    """Begin no further step; requests keep what they have."""
    RESUME = "resume"
    UPDATE_WEIGHTS = "update_weights"
    """Take other weights of the same model, while paused and nothing runs."""


@dataclass(frozen=True, slots=True)
class Control:
    """Answered by a `ControlReply`."""

    op_id: int
    """Chosen by the client; the reply carries it."""
    kind: ControlKind
    path: str = ""
    """With UPDATE_WEIGHTS: the folder that has them."""


class ErrorKind(enum.Enum):
    """Whose fault an error is."""

    ENGINE = "engine"
    """The engine's own."""
    REQUEST = "request"
    """The request can't be served as written, for example since its adapter can't be used."""
    NOT_FOUND = "not_found"
    """It names an adapter that is not there (any more)."""
    UNAVAILABLE = "unavailable"
    """What it needs can't be reached now; the same request may succeed later."""


@dataclass(frozen=True, slots=True)
class LoraReply:
    """How a `LoadLora` or an `UnloadLora` went. Fields that do not apply have their defaults."""

    op_id: int
    error: str | None = None
    error_kind: ErrorKind = ErrorKind.ENGINE
    path: str = ""
    """Where the files were found."""
    digest: str = ""
    """In hexadecimal."""
    rank: int = 0
    num_bytes: int = 0
    """Loaded: the size of its weights. Unloaded: what of it is free again now."""
    modules: tuple[str, ...] = ()
    """The kinds of weights it changes, as `q_proj`."""
    is_unchanged: bool = False
    """The name had this content already."""
    num_pages: int = 0
    """Pages of its cache that are free again now."""
    num_requests: int = 0
    """Requests that still hold what was unloaded; their share is freed when they are over."""


@dataclass(slots=True)
class CacheUse:
    """Where a sequence's reused tokens were, and why the rest had to be computed (S07). Not frozen,
    since each request has one."""

    num_host_tokens: int
    """Had to come from the host."""
    num_storage_tokens: int
    """Had to come from storage."""
    limit: str
    """`nothing` (all but the last token was found), `cold`, `namespace`, `window`, `checkpoint`,
    `tier` (loading it would take longer than computing) or `off`."""


@dataclass(frozen=True, slots=True)
class ControlReply:
    """How a `Control` went."""

    op_id: int
    error: str | None = None
    error_kind: ErrorKind = ErrorKind.ENGINE
    num_pages: int = 0
    """Of the device, free again now."""


@dataclass(frozen=True, slots=True)
class DraftUse:
    """Guessed tokens that a step checked."""

    num_draft_tokens: int
    num_accepted_tokens: int
    """Those that come first among the new tokens of the output."""


@dataclass(slots=True)
class Notice:
    """What only failed sequences, embeddings, drafts, and first outputs have. Not frozen, since
    each request has one."""

    error_kind: ErrorKind = ErrorKind.ENGINE
    error_field: str | None = None
    """The caller's field that is at fault, where the engine knows."""
    adapter_was: Tier | None = None
    """Where the weights were when the request came."""
    hidden: tuple[float, ...] = ()
    """Of a request that asked: the hidden state after its prompt."""
    cache_use: CacheUse | None = None
    """With the first token."""
    revision: str | None = None
    """With the first output: which revision of the adapter computes it."""
    drafts: DraftUse | None = None
    """With tokens whose step checked guesses."""


@dataclass(slots=True)
class Output:
    """Output of one sequence. Not frozen, because a step makes hundreds; none changes after it
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
    notice: Notice | None = None
    """What few have to say: one field, since a step encodes hundreds of these."""

    @property
    def error_kind(self) -> ErrorKind:
        return ErrorKind.ENGINE if self.notice is None else self.notice.error_kind

    @property
    def adapter_was(self) -> Tier | None:
        return None if self.notice is None else self.notice.adapter_was

    @property
    def revision(self) -> str | None:
        return None if self.notice is None else self.notice.revision

    @property
    def cache_use(self) -> CacheUse | None:
        return None if self.notice is None else self.notice.cache_use

    @property
    def drafts(self) -> DraftUse | None:
        return None if self.notice is None else self.notice.drafts


@dataclass(slots=True)
class Tokens:
    """One new token for each of many sequences that have nothing else to say, column by column."""

    request_ids: Int64s
    tokens: Int32s
    num_cached_tokens: Int32s
    """As in `Output`."""

    def where(self, chosen: Bools) -> Tokens:
        return Tokens(self.request_ids[chosen], self.tokens[chosen], self.num_cached_tokens[chosen])


@dataclass(slots=True)
class StepOutputs:
    """Outputs of many sequences, each named at most once. Reads as a sequence of `Output`s; those
    of `tokens` are made as they are read, which is the reader's time and not the engine's."""

    outputs: list[Output]
    tokens: Tokens | None = None

    def __iter__(self) -> Iterator[Output]:
        if self.tokens is not None:
            columns = (self.tokens.request_ids, self.tokens.tokens, self.tokens.num_cached_tokens)
            for request_id, token, num_cached in zip(*(c.tolist() for c in columns), strict=True):
                yield Output(request_id, [token], None, num_cached)
        yield from self.outputs

    def single_out(self, request_ids: Container[RequestId]) -> None:
        """Make the plain tokens of these sequences `outputs`, to which more can be said."""
        if self.tokens is None:
            return
        chosen = np.array([number in request_ids for number in self.tokens.request_ids.tolist()])
        if chosen.any():
            self.outputs[:0] = StepOutputs([], self.tokens.where(chosen))
            self.tokens = self.tokens.where(~chosen)

    def __len__(self) -> int:
        return len(self.outputs) + (0 if self.tokens is None else len(self.tokens.tokens))


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the input processor needs to know of the engine to refuse what can't be served."""

    model_path: str
    """Folder or file the weights came from (after any download)."""
    model_name: str
    """Name for the API where the user gave none."""
    vocab_size: int
    max_model_len: int
    """One request of this length always fits."""
    page_size: int
    num_pages: int
    """Of all layers: what the memory is worth, whatever its families got of it."""
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    scheduling_policy: str
    max_loras: int
    """Most distinct adapters in one step; 0 without --enable-lora."""
    page_identity: bytes = b""
    """Of the model and its layout, in the hashes of its pages."""
    request_bytes: tuple[tuple[int, int], ...] = ()
    """Lengths in tokens, and the device memory that a decoding request of each length holds."""


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """Counts for the metrics page; totals since start unless the name says otherwise."""

    num_loaded: int
    """Names that take requests."""
    num_draining: int
    """Old versions that requests still hold."""
    num_slots: int
    """Places on the device; 0 if they are made as needed."""
    num_on_device: int
    num_on_host: int
    num_loading: int
    num_running: int
    """Distinct adapters that running requests use."""
    total_loads_from_host: int
    total_loads_from_storage: int
    total_failed_loads: int
    total_device_evictions: int
    total_host_evictions: int
    total_device_unloads: int = 0
    """Left because no name and no request needs them."""
    total_host_unloads: int = 0
    device_bytes: int = 0
    """Of a rank, in blocks that adapters share; 0 where slots alone are counted."""
    used_device_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StorageStats:
    """Counts for the metrics page; totals since start unless the name says otherwise."""

    is_read: bool
    """Now; else it failed too often, and is left alone for a while."""
    is_written: bool
    total_missing_units: int
    """Asked for, and not there or not whole."""
    total_failed_units: int
    """Asked for when storage could not be reached."""
    total_unwritten_units: int
    total_outages: int
    """Times that reading or writing was given up for a while."""


@dataclass(frozen=True, slots=True)
class SelfCheckStats:
    """Cache hits that were computed again and compared, since start (R09)."""

    total_checks: int
    total_differences: int


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Guessed tokens since start."""

    total_drafts: int
    total_draft_tokens: int
    total_accepted_tokens: int
    accepted_by_place: tuple[int, ...]
    """By place in a draft, how often its token was right."""


@dataclass(frozen=True, slots=True)
class LoadTime:
    """An adapter was brought nearer: read from storage to the host, or loaded to the device."""

    source: Tier
    target: Tier
    seconds: float
    is_good: bool
    digest: str = ""
    """Of what came, in hexadecimal; empty if it could not be read."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts for the metrics page; totals since start unless the name says otherwise."""

    num_running: int
    num_waiting: int
    num_pages: int
    """Pages here are those of the first family of layers, which sees everything if any does."""
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
    adapters: AdapterStats | None = None
    storage: StorageStats | None = None
    """None where pages do not go to storage."""
    missed_tokens: dict[str, int] = field(default_factory=dict)
    """Looked up and not reused, though whole pages of them could be: by the reason (`cold`,
    `namespace`, `window`, `checkpoint`, `tier`)."""
    page_usage: float = 0.0
    """What share of its pages requests hold, of the family of layers that is nearest to its end."""
    total_host_hit_tokens: int = 0
    """Of those that were found: had to come from the host, or by way of it."""
    total_storage_hit_tokens: int = 0
    """Of those: from storage."""
    self_check: SelfCheckStats | None = None
    """None without --kv-check-share."""
    connector_drops: dict[str, int] = field(default_factory=dict)
    """By connector: batches of events that it was too slow for."""
    connector_failures: dict[str, int] = field(default_factory=dict)
    """By connector: calls that raised."""
    speculation: SpeculationStats | None = None
    """None without --speculative-config."""
    num_host_pages: int = 0
    num_cached_host_pages: int = 0
    num_paused: int = 0
    """Requests that have begun and have no row for now, because another adapter runs."""
    total_pauses: int = 0
    total_skipped_checkpoints: int = 0
    """States of recurrent layers that were not saved because memory was full."""
    first_runs: dict[str, int] = field(default_factory=dict)
    """By kind: kernels compiled and graphs captured for steps, because the start did not."""


@dataclass(frozen=True, slots=True)
class PageChange:
    """Pages that can be reused from now on, or no more; for a router of several engines."""

    tier: Tier
    hashes: list[int]
    """The last 64 bits of each page's hash, as in KV events."""
    is_stored: bool
    adapter: tuple[AdapterName, AdapterDigest] | None = None
    """Of stored pages: what the adapter that computed them is called, and its content. None for
    the base model, and for an adapter without a name."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything the engine says after one step."""

    outputs: StepOutputs
    stats: Stats
    replies: list[LoraReply] = field(default_factory=list)
    loads: list[LoadTime] = field(default_factory=list)
    controls: list[ControlReply] = field(default_factory=list)
    pages: list[PageChange] = field(default_factory=list)
    """Where `EngineSettings.reports_pages` asks for them."""
