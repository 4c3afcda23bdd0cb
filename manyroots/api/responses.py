"""The shapes of responses, as OpenAI's clients read them, with vLLM's extensions.

Plain msgspec structs; what fills them is in the route files.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from manyroots.snapshot import ReplicaView

Finish = str | None


class CachedByTier(msgspec.Struct):
    device: int
    host: int
    storage: int


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    cached_by_tier: CachedByTier | msgspec.UnsetType = msgspec.UNSET
    """Where those were."""
    uncached_because: str | msgspec.UnsetType = msgspec.UNSET
    """Why the rest had to be computed, of the first prompt; `docs/tiers.md` has the words."""


class CompletionTokensDetails(msgspec.Struct):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    """Drafted and not part of the completion: they do not count as its tokens."""


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET
    """Where the server drafted tokens for the request."""


class ScoredToken(msgspec.Struct):
    """A prompt position in vLLM's form: keyed by token id."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, ScoredToken] | None]


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    adapter_revision: str | msgspec.UnsetType = msgspec.UNSET
    """Which revision of the adapter computed it; of a stream, in its first chunk."""
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A whole completion, or one chunk of a streamed one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class ChatTopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    """With a stream: the name comes whole, in the call's first chunk."""

    name: str | msgspec.UnsetType
    arguments: str


class ChatToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: str = "function"


class ChatMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ChatToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish = None
    stop_reason: str | int | None = None
    adapter_revision: str | msgspec.UnsetType = msgspec.UNSET
    """Which revision of the adapter computed it; of a stream, in its first chunk."""
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatToolCallDelta(msgspec.Struct, omit_defaults=True):
    """The first of a call has its id, type and name; later ones more of its arguments."""

    index: int
    function: CalledFunction
    id: str | None = None
    type: str | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish = None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    adapter_revision: str | msgspec.UnsetType = msgspec.UNSET
    """Which revision of the adapter computed it; of a stream, in its first chunk."""
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """What OpenAI's clients read, and what Anthropic's do: `type`, `display_name`, `created_at`."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "manyroots"
    root: str
    parent: str | None = None
    max_model_len: int
    type: str = "model"
    display_name: str
    created_at: datetime


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a client needs to write prompts itself, named as in `tokenizer_config.json`."""

    tokenizer_class: str
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    chat_template: str | None = None
    model_max_length: int


class EmbeddingsUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddedText(msgspec.Struct, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str
    """Numbers, or their bytes (float32, little-endian) in base64."""


class EmbeddingList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[EmbeddedText]
    model: str
    usage: EmbeddingsUsage


class Detokenized(msgspec.Struct):
    prompt: str


class AdapterState(msgspec.Struct, kw_only=True):
    """Where one revision of an adapter is."""

    name: str
    revision: str
    """Empty for one that has not been read."""
    tier: str
    """device, host or storage."""
    state: str
    """idle, running, loading, paused, waiting or unread."""
    draining: bool
    pinned: bool
    rank: int
    num_bytes: int
    loads: int
    left: str | None
    """Why it last left a tier."""
    came_seconds: dict[str, float]
    """How long its last ways took, as `storage to host`."""
    running: int | msgspec.UnsetType = msgspec.UNSET
    waiting: int | msgspec.UnsetType = msgspec.UNSET
    """Of all callers, so that limited keys are not told."""


class AdapterStates(msgspec.Struct):
    data: list[AdapterState]
    object: str = "list"


class Replicas(msgspec.Struct):
    data: list[ReplicaView]
    object: str = "list"


class LoraLoaded(msgspec.Struct, kw_only=True):
    """What a name means from now on."""

    object: str = "lora_adapter"
    lora_name: str
    lora_path: str
    status: str
    """loaded, or unchanged if the name had this very content."""
    rank: int
    num_bytes: int
    digest: str
    revision: str
    """What answers call this content; `name@revision` asks for it while it is alive."""
    modules: list[str]
    pinned: bool


class LoraUnloaded(msgspec.Struct, kw_only=True):
    """What an adapter has given back."""

    object: str = "lora_adapter"
    lora_name: str
    status: str
    """unloaded, or draining while requests still run with it."""
    freed_pages: int
    freed_bytes: int
    draining_requests: int
