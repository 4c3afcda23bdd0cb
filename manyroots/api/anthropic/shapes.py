"""What `/v1/messages` takes and gives, as Anthropic's clients write and read it."""

from __future__ import annotations

from typing import Any

import msgspec

from manyroots.api.requests import Ignored, Unsupported


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether to think first. How long is the model's choice: the budget is not held."""

    type: str
    budget_tokens: Ignored = None
    display: Ignored = None


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    effort: str | None = None


class PromptFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a message and the counting of its tokens have in common."""

    model: str
    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    """Keeps the whole prompt, like a mark on its last block."""
    mcp_servers: Unsupported = None
    context_management: Ignored = None
    """Nothing is ever taken out of a conversation here."""


class MessagesRequest(PromptFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages"""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    metadata: Ignored = None
    service_tier: Ignored = None
    inference_geo: Ignored = None
    container: Unsupported = None


class CountTokensRequest(PromptFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens"""


SAME_IN_CHATS = (
    "stream", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "min_tokens",
    "ignore_eos", "cache_salt", "priority",
)  # fmt: skip
"""Fields that a chat has, too."""
NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_format",
    "reasoning_effort": "output_config.effort",
}
"""What a chat's fields are called here."""
UNSUPPORTED = ("mcp_servers", "container")


class CacheCreation(msgspec.Struct):
    """Tokens that `cache_control` marked and that were not cached yet, as whole pages. What is not
    marked is kept as well while there is room."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class ThinkingTokens(msgspec.Struct):
    thinking_tokens: int


class MessageDeltaUsage(msgspec.Struct, kw_only=True):
    """So far; what the last event of a stream tells."""

    input_tokens: int
    """Beside those that were cached, or are from now on because `cache_control` asks for it."""
    output_tokens: int
    output_tokens_details: ThinkingTokens
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    server_tool_use: None = None


class MessageUsage(MessageDeltaUsage, kw_only=True):
    cache_creation: CacheCreation = msgspec.field(default_factory=CacheCreation)
    inference_geo: None = None
    service_tier: str = "standard"


class MessageAnswer(msgspec.Struct, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    stop_details: None = None
    container: None = None
    usage: MessageUsage
    adapter_revision: str | msgspec.UnsetType = msgspec.UNSET
    """Which revision of the adapter computed it; of a stream, in `message_start`."""


class TokenCount(msgspec.Struct):
    input_tokens: int
