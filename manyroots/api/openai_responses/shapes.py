"""What `/v1/responses` takes and gives.

Nothing is stored here: an answer is the caller's to keep, and to send back as input.
"""

from __future__ import annotations

from typing import Any

import msgspec

from manyroots.api.requests import Ignored, SampledFields, Unsupported


class ReasoningOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: str | None = None
    summary: Ignored = None
    generate_summary: Ignored = None


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: Ignored = None


class ResponsesRequest(SampledFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses"""

    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    stream_options: Ignored = None
    client_metadata: Ignored = None
    truncation: Ignored = None
    """A prompt that does not fit is refused, with its length and the context's."""
    max_tool_calls: Ignored = None
    """Of tools that a server runs; this one runs none."""
    context_management: Ignored = None

    previous_response_id: Unsupported = None
    conversation: Unsupported = None
    prompt: Unsupported = None
    background: Unsupported = None


REMEDIES: dict[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((), "nothing is stored here; send the whole conversation as input"),
    "conversation": ((), "nothing is stored here; send the whole conversation as input"),
    "prompt": ((), "no prompts are stored here; send instructions and input"),
    "background": ((False,), "stream the answer, or wait for it"),
}
"""Of what can't be had: values that ask for nothing else, and what to do instead."""

SAME_IN_CHATS = (
    *SampledFields.__struct_fields__,
    "chat_template_kwargs",
    "parallel_tool_calls",
)
"""Fields that a chat has, too."""
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""What a chat's fields are called here."""


class InputTokenCount(msgspec.Struct):
    input_tokens: int
    object: str = "response.input_tokens"


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputText(msgspec.Struct, kw_only=True):
    type: str = "output_text"
    text: str = ""
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[Any] = msgspec.field(default_factory=list)


class ReasoningText(msgspec.Struct, kw_only=True):
    type: str = "reasoning_text"
    text: str = ""


class OutputMessage(msgspec.Struct, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    status: str = "completed"
    content: list[OutputText] = msgspec.field(default_factory=list)


class OutputReasoning(msgspec.Struct, kw_only=True):
    id: str
    type: str = "reasoning"
    status: str = "completed"
    summary: list[Any] = msgspec.field(default_factory=list)
    content: list[ReasoningText] = msgspec.field(default_factory=list)


class OutputCall(msgspec.Struct, kw_only=True):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    """Of a function that a tool of type `namespace` holds."""
    type: str = "function_call"
    status: str = "completed"


class OutputCustomCall(msgspec.Struct, kw_only=True):
    id: str
    call_id: str
    name: str
    input: str = ""
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    type: str = "custom_tool_call"
    status: str = "completed"


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class ResponseFailure(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """An answer, so far or whole."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: Any = None
    model: str
    output: list[Any]
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: ReasoningOptions | None = None
    service_tier: str = "default"
    store: bool = False
    temperature: float
    presence_penalty: float
    frequency_penalty: float
    text: TextOptions
    tool_choice: Any = "auto"
    tools: list[Any]
    max_tool_calls: None = None
    top_logprobs: int = 0
    top_p: float
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: Any = None
    adapter_revision: str | msgspec.UnsetType = msgspec.UNSET
    """Which revision of the adapter computed it."""
