"""Checks of requests that types alone can't make.

Takes typed requests; gives `SamplingParams`, a salt, a list of prompts; raises RequestError
naming the field. Knows nothing of the model: that is the input processor's part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_type_hints

import msgspec

from manyroots.api.requests import (
    INSTEAD,
    SAME_AS_ABSENT,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    ResponseFormat,
    StructuredOutputs,
    Unsupported,
)
from manyroots.api.tenants import current_tenant
from manyroots.errors import RequestError
from manyroots.grammar.checks import check_structure
from manyroots.sampling import MAX_LOGPROBS, SamplingParams
from manyroots.structured_outputs import KINDS, StructuredOutputsParams
from manyroots.text.generation_config import NO_DEFAULTS, SamplingDefaults

MAX_SALT_CHARACTERS = 256
_SAME_NAMES = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "min_tokens", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "prompt_logprobs", "allowed_token_ids", "bad_words",
)  # fmt: skip


def _unsupported_names(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    hints = get_type_hints(kind, include_extras=True)
    return tuple(name for name, hint in hints.items() if hint == Unsupported)


_STRUCTURE_FIELDS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "regex", "ebnf", "json_schema",
)  # fmt: skip
_KINDS_BY_FIELD = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice",
    "guided_grammar": "grammar", "regex": "regex", "ebnf": "grammar", "json_schema": "json",
}  # fmt: skip
"""Fields that hold one kind of structure: vLLM's older names, and SGLang's."""
_UNSUPPORTED_STRUCTURES = _unsupported_names(StructuredOutputs)
_UNSUPPORTED: dict[type[GenerationFields], tuple[str, ...]] = {
    kind: _unsupported_names(kind) for kind in (CompletionRequest, ChatRequest)
}


def check_supported(request: GenerationFields) -> None:
    """Refuse what can't be honoured: a caller must not think that it was."""
    for name in _UNSUPPORTED[type(request)]:
        value = getattr(request, name)
        if value is None or value in SAME_AS_ABSENT.get(name, ()):
            continue
        if name == "best_of" and value == (request.n or 1):
            continue
        remedy = INSTEAD.get(name, "remove it")
        raise RequestError(f"{name} is not supported by this server; {remedy}.", field=name)
    if not request.stream and any(wanted_usage(request)):
        raise RequestError(
            "stream_options is given without stream; set stream to true or remove it.",
            field="stream_options",
        )
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs can't be streamed; set stream to false.", field="prompt_logprobs"
        )


def wanted_usage(request: GenerationFields) -> tuple[bool, bool]:
    """Whether a stream ends with its usage, and whether every chunk has the usage so far."""
    options = request.stream_options
    if options is None:
        return False, False
    return bool(options.include_usage), bool(options.continuous_usage_stats)


def check_spaces(request: GenerationFields, *, joins_by_spaces: bool) -> None:
    """Where special tokens are not shown, or tokens spell their own spaces, there are none to leave
    out. `joins_by_spaces`: the tokenizer's decoder writes some between tokens."""
    unwanted = request.spaces_between_special_tokens is False
    if unwanted and request.skip_special_tokens is False and joins_by_spaces:
        raise RequestError(
            "spaces_between_special_tokens is false, and this model's tokenizer joins tokens by "
            "spaces; leave it out.",
            field="spaces_between_special_tokens",
        )


def wants_structure(request: GenerationFields) -> bool:
    """Whether `structure_of` has anything to look at."""
    return any(getattr(request, name) is not None for name in _STRUCTURE_FIELDS)


def structure_of(request: GenerationFields) -> tuple[str, StructuredOutputsParams] | None:
    """The shape that a request wants of its output, and what the request calls it; None for any.
    Checked: what can't be honoured is refused. May take a moment, for a large schema."""
    found = [(name, params) for name, params in _structures(request) if params is not None]
    if not found:
        return None
    name, params = found[0]
    for other, also in found[1:]:
        # The same twice is one wish, told to servers of two ages.
        if also != params:
            raise RequestError(
                f"{name} and {other} are both given, and differ; give one of them.", field=other
            )
    check_structure(params, name)
    return found[0]


def _structures(
    request: GenerationFields,
) -> Iterator[tuple[str, StructuredOutputsParams | None]]:
    """By the names of fields."""
    yield "response_format", _response_format(request.response_format)
    yield "structured_outputs", _structured_outputs(request.structured_outputs)
    for name, kind in _KINDS_BY_FIELD.items():
        value = getattr(request, name)
        if value is not None:
            yield name, _params(name, **{kind: value})


def _response_format(wanted: ResponseFormat | None) -> StructuredOutputsParams | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type in ("json", "regex"):
        return _params("response_format", **{wanted.type: _given(wanted.value, "value")})
    if wanted.type not in ("json_object", "json_schema"):
        raise RequestError(
            f"response_format.type is {wanted.type[:60]!r}; choose 'text', 'json_object' or "
            "'json_schema'.",
            field="response_format",
        )
    schema = wanted.value if wanted.schema is None else wanted.schema
    if wanted.json_schema is not None:
        schema = wanted.json_schema.schema
    if wanted.type == "json_schema":
        schema = _given(schema, "json_schema.schema")
    if schema is None:
        return _params("response_format", json_object=True)
    return _params("response_format", json=schema)


def _given(shape: Any, name: str) -> Any:
    """What a response_format of this type can't do without."""
    if shape is None:
        raise RequestError(
            f"response_format.{name} is missing; give the shape there.", field="response_format"
        )
    return shape


def _structured_outputs(wanted: StructuredOutputs | None) -> StructuredOutputsParams | None:
    if wanted is None:
        return None
    for name in _UNSUPPORTED_STRUCTURES:
        if getattr(wanted, name) not in (None, False):
            field = f"structured_outputs.{name}"
            raise RequestError(f"{field} is not supported by this server; remove it.", field=field)
    given = {name: getattr(wanted, name) for name in KINDS}
    if all(value in (None, False) for value in given.values()):
        return None
    return _params("structured_outputs", **given)


def _params(field: str, **values: Any) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**values, asked_as=field)
    except RequestError as error:
        raise RequestError(str(error).replace("structured_outputs", field), field=field) from error


def salt_of(request: GenerationFields) -> str | None:
    """The salt of a request's namespace: its key's name and its own cache_salt."""
    salt = request.cache_salt
    if salt is not None:
        if not 1 <= len(salt) <= MAX_SALT_CHARACTERS:
            raise RequestError(
                f"cache_salt has {len(salt)} characters; "
                f"it must have from 1 to {MAX_SALT_CHARACTERS}.",
                field="cache_salt",
            )
        # Slashes alone are part of base64, which is how salts are usually written.
        if not salt.isprintable() or "../" in salt or "..\\" in salt:
            raise RequestError(
                "cache_salt holds a control character or a path; "
                "use random letters and digits, for example 32 random bytes in base64.",
                field="cache_salt",
            )
    tenant = current_tenant()
    if tenant is not None:
        # What one key has sent is not found, and so not timed, by another.
        salt = f"{tenant.name}\0{'' if salt is None else salt}"
    return salt


def is_only_echo(request: CompletionRequest) -> bool:
    """Whether the prompt itself is all that is wanted, with its logprobs: for scoring texts. The
    engine makes a token all the same, which no caller sees."""
    return bool(request.echo) and request.max_tokens == 0


def completion_sampling(
    request: CompletionRequest, defaults: SamplingDefaults = NO_DEFAULTS
) -> SamplingParams:
    """`defaults`: the model's, for what the request leaves open."""
    more: dict[str, Any] = {"logprobs": request.logprobs}
    if request.max_tokens is not msgspec.UNSET:
        more["max_tokens"] = 1 if is_only_echo(request) else request.max_tokens
    if request.echo and request.logprobs is not None:
        # The echoed prompt's tokens need their logprobs too.
        more["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    return _sampling(request, more, defaults)


def chat_sampling(request: ChatRequest, defaults: SamplingDefaults = NO_DEFAULTS) -> SamplingParams:
    """`defaults`: the model's, for what the request leaves open."""
    older, limit = request.max_tokens, request.max_completion_tokens
    if older is not None and limit is not None and older != limit:
        raise RequestError(
            f"max_tokens is {older} and max_completion_tokens is {limit}; "
            "give only max_completion_tokens.",
            field="max_completion_tokens",
        )
    top = request.top_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(
            f"top_logprobs is {top}; it must be an integer from 0 to {MAX_LOGPROBS}.",
            field="top_logprobs",
        )
    if top and not request.logprobs:
        raise RequestError(
            "top_logprobs is given without logprobs; set logprobs to true.", field="top_logprobs"
        )
    more = {
        "logprobs": (top or 0) if request.logprobs else None,
        "max_tokens": older if limit is None else limit,
    }
    return _sampling(request, more, defaults)


def _sampling(
    request: GenerationFields, more: dict[str, Any], defaults: SamplingDefaults
) -> SamplingParams:
    values = {name: getattr(request, name) for name in _SAME_NAMES}
    if request.no_stop_trim is not None:
        values["include_stop_str_in_output"] = request.no_stop_trim
    given = {name: value for name, value in values.items() if value is not None}
    stop = request.stop
    return defaults.params(
        **(given | more),
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logit_bias=_logit_bias(request.logit_bias or {}),
    )


def check_logprobs(sampling: SamplingParams, limit: int, field: str) -> None:
    """Refuse more than the operator allows. `field`: what those of the output are called."""
    for name, count in ((field, sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None and count > limit:
            raise RequestError(
                f"{name} is {count}; this server allows at most {limit} (--max-logprobs).",
                field=name,
            )


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    checked: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 20):
            raise RequestError(
                f"logit_bias has the key {key[:60]!r}; keys must be token ids, as '42'.",
                field="logit_bias",
            )
        checked[int(key)] = bias
    return checked


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts, one or many, each text or token ids."""
    prompt = request.prompt
    if prompt is None or prompt == []:
        raise RequestError("prompt is missing or empty; give a text.", field="prompt")
    if isinstance(prompt, str):
        return [prompt]
    if _are_ids(prompt):
        return [prompt]
    for place, item in enumerate(prompt):
        if not isinstance(item, str) and not (isinstance(item, list) and _are_ids(item)):
            raise RequestError(
                f"prompt[{place}] is neither a string nor a list of token ids; a prompt is a "
                "string, a list of strings, a list of token ids, or a list of such lists.",
                field="prompt",
            )
    return prompt


def _are_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


def check_count(num_prompts: int, n: int, limit: int) -> int:
    """How many sequences a request makes; refused before anything is allocated for them."""
    total = num_prompts * n
    if total > limit:
        raise RequestError(
            f"{num_prompts} prompts times n={n} make {total} sequences; "
            f"at most {limit} are allowed in one request.",
            field="prompt" if num_prompts > limit else "n",
        )
    return total
