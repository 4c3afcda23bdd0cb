"""The shapes of requests: OpenAI's fields, and the extensions that vLLM's users know.

Fields that this server carries out have types. Fields that mean nothing here but do no harm are
`Ignored`. Fields that would change the result, and can't be honoured, are `Unsupported`: they
are refused unless they ask for what happens anyway.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Ignored = Annotated[Any, "accepted, without effect"]
Unsupported = Annotated[Any, "refused unless null or in SAME_AS_ABSENT"]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk."""
    include_obfuscation: Ignored = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: Ignored = None
    schema: dict[str, Any] | None = None
    strict: Ignored = None
    """What is asked for is honoured exactly in either case."""


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None
    """With json_object or json_schema, as some servers have it."""
    value: str | dict[str, Any] | None = None
    """TGI's: a schema with json_object or json, an expression with regex. huggingface_hub sends
    every schema so."""


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """As in vLLM; at most one of the first five."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_fallback: Ignored = None
    disable_any_whitespace: Unsupported = None
    disable_additional_properties: Unsupported = None
    whitespace_pattern: Unsupported = None
    structural_tag: Unsupported = None


class WeightedAdapter(msgspec.Struct, forbid_unknown_fields=True):
    """One of several adapters that answer together."""

    name: str
    weight: float = 1.0


class RetentionRange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Keep the prompt up to a token in the cache."""

    until_token: int
    priority: int = 50
    """0 to 100; the higher, the longer it stays where such ranges compete."""
    for_s: float = 300.0
    """Seconds, from the end of the request."""


class SampledFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What completions, chats and responses have in common."""

    model: str
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    """Nothing else is sampled; the text's end neither, unless it is one of them."""
    bad_words: list[str] | None = None
    """Not said by the tokens that spell them."""
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    lora_path: str | list[str | None] | None = None
    """The name of an adapter, or one for each prompt; null is the base model."""
    cache_salt: str | None = None
    priority: int | None = None
    """With --scheduling-policy priority: the lower, the more important."""

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    request_id: Ignored = None


class GenerationFields(SampledFields, kw_only=True, forbid_unknown_fields=True):
    """What completions and chats have in common beyond it."""

    n: int | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """False where no tokenizer's decoder would put any: texts are what tokens spell."""
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    retention: list[RetentionRange] | None = None
    """Ranges of the prompt that the cache is to keep, within the caller's share of it."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Logprobs name tokens as `token_id:42` instead of by their text."""
    truncate_prompt_tokens: int | None = None
    """Keep this many of the prompt's last tokens; -1 is as many as fit."""
    truncation_side: str | None = None
    """Where those are cut: 'left' keeps the last tokens, 'right' the first."""
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    """This, `ebnf`, `json_schema` and `no_stop_trim` are SGLang's names."""
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    no_stop_trim: bool | None = None
    adapters: list[WeightedAdapter] | None = None
    """Several adapters, each with its weight, whose sum answers."""

    rid: Ignored = None
    guided_decoding_backend: Ignored = None

    best_of: Unsupported = None
    use_beam_search: Unsupported = None
    length_penalty: Unsupported = None
    kv_transfer_params: Unsupported = None
    prompt_embeds: Unsupported = None
    guided_whitespace_pattern: Unsupported = None
    separate_reasoning: Unsupported = None
    stream_reasoning: Unsupported = None
    return_hidden_states: Unsupported = None
    vllm_xargs: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    media_io_kwargs: Unsupported = None


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions"""

    prompt: str | list[Any] | None = None
    max_tokens: int | msgspec.UnsetType | None = msgspec.UNSET  # type: ignore[assignment]
    """Left out it is 16; null is as many as fit, as in chats."""
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Unsupported = None
    thinking_token_budget: Unsupported = None


class ChatRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions"""

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    """The end of the reasoning is forced after this many tokens of it."""
    include_reasoning: bool | None = None
    """False leaves the reasoning out of the answer."""
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    prediction: Ignored = None
    verbosity: Ignored = None

    functions: Unsupported = None
    function_call: Unsupported = None
    chat_template: Unsupported = None
    documents: Unsupported = None
    modalities: Unsupported = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    echo: Unsupported = None


class EmbeddingsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings"""

    model: str
    input: str | list[Any]
    encoding_format: str | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    lora_path: str | list[str | None] | None = None
    user: Ignored = None
    request_id: Ignored = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    dimensions: int | None = None
    """The length of the model's own vectors, which some clients send; no other is had."""
    messages: Unsupported = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize, with either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[int]


class LoadLoraRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/load_lora_adapter"""

    lora_name: str
    lora_path: str
    pinned: bool | None = None
    load_inplace: bool | None = None
    lora_int_id: Ignored = None
    base_model_name: Ignored = None


class UnloadLoraRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/unload_lora_adapter"""

    lora_name: str
    lora_int_id: Ignored = None


SAME_AS_ABSENT: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "echo": (False,),
    "documents": ([],),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "return_hidden_states": (False,),
}
"""Values of unsupported fields that ask for nothing but what happens anyway."""
INSTEAD = {
    "functions": "send tools instead",
    "function_call": "send tool_choice instead",
    "chat_template": "start the server with --chat-template instead",
    "separate_reasoning": "start the server with --reasoning-parser none instead",
    "documents": "write them into the messages instead",
    "thinking_token_budget": "/v1/chat/completions, which knows the model's reasoning, takes it",
    "echo": "put the last message in front of the answer yourself",
}
"""What to do about unsupported fields, other than to remove them."""
ELSEWHERE = {
    "extra_body": "an argument of OpenAI's Python client: put its fields beside the others",
    "extra_headers": "an argument of OpenAI's Python client: send them as headers",
    "sampling_params": "put its fields beside the others",
    "parameters": "put its fields beside the others",
    "max_new_tokens": "send max_tokens",
    "enable_thinking": "send it in chat_template_kwargs",
    "prompt": "/v1/completions takes it",
    "messages": "/v1/chat/completions takes it",
    "input": "/v1/responses and /v1/embeddings take it",
}
"""Where fields belong that callers put where they are not known."""
