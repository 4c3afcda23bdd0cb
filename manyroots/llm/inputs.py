"""What callers of `LLM` hand over, in the forms that scripts written for vLLM have.

Takes prompts as text, token ids (lists, arrays, tensors) or mappings of them, and what may be one
for all prompts or one for each; gives a plain list, one entry per prompt. Looks at no adapter's
files and knows nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import UnionType
from typing import Any, TypeVar

from manyroots.adapter_names import LoRARequest
from manyroots.errors import RequestError

T = TypeVar("T")

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, its token ids, or {"prompt": text} or {"prompt_token_ids": ids}, which may have a
cache_salt beside it."""


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """One prompt: a text or token ids."""

    text: str | None
    tokens: Sequence[int] | None
    cache_salt: str | None = None


def prompts_of(given: Any) -> list[GivenPrompt]:
    """One prompt or many."""
    given = _plain(given)
    if isinstance(given, str | Mapping) or _are_ids(given):
        given = [given]
    if not _is_list(given):
        raise RequestError(
            f"prompts is {given!r:.100}; it must be a text, token ids, or a list of them.",
            field="prompts",
        )
    return [_prompt(_plain(item), place) for place, item in enumerate(given)]


def _prompt(item: Any, place: int) -> GivenPrompt:
    if isinstance(item, str):
        return GivenPrompt(item, None)
    if not isinstance(item, Mapping):
        if not _is_list(item):
            raise RequestError(
                f"prompts[{place}] is {item!r:.100}; it must be a text or token ids.",
                field="prompts",
            )
        return GivenPrompt(None, item)
    unknown = [
        name
        for name, value in item.items()
        if name not in ("prompt", "prompt_token_ids", "cache_salt", "type") and value is not None
    ]
    if unknown:
        raise RequestError(
            f"prompts[{place}] has {unknown[0]!r}; text alone is served: give prompt or "
            "prompt_token_ids, and maybe cache_salt.",
            field="prompts",
        )
    text, tokens = item.get("prompt"), _plain(item.get("prompt_token_ids"))
    if text is None and tokens is None:
        raise RequestError(
            f"prompts[{place}] has neither prompt nor prompt_token_ids; give one of them.",
            field="prompts",
        )
    if text is not None and not isinstance(text, str):
        raise RequestError(
            f"prompts[{place}]['prompt'] is {text!r:.100}; it must be a text. Token ids go into "
            "prompt_token_ids.",
            field="prompts",
        )
    # With both, the ids are what the text was turned into.
    return GivenPrompt(text, tokens, item.get("cache_salt"))


def _plain(value: Any) -> Any:
    """Arrays and tensors, on whatever device, as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_list(value: Any) -> bool:
    """Bytes are not: their numbers would be taken for token ids."""
    return isinstance(value, Sequence) and not isinstance(value, bytes | bytearray)


def _are_ids(value: Any) -> bool:
    return _is_list(value) and len(value) > 0 and isinstance(value[0], Integral)


def per_prompt(name: str, given: Any, kind: type[T], count: int) -> list[T | None]:
    """`given`: one for all, of a `kind`, or one for each; None where nothing is given."""
    if given is None or isinstance(given, kind):
        return [given] * count
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RequestError(
            f"{name} is {given!r:.100}; give one for all prompts, or a list with one each.",
            field=name,
        )
    if len(given) != count:
        raise RequestError(
            f"{count} prompts came with {len(given)} entries of {name}; give one for all, or one "
            "each.",
            field=name,
        )
    for place, item in enumerate(given):
        if item is not None and not isinstance(item, kind):
            raise RequestError(
                f"{name}[{place}] is {item!r:.100}; it must be of type {kind.__name__}.",
                field=name,
            )
    return list(given)


def check_type(name: str, given: Any, kind: type | UnionType) -> None:
    """Raises RequestError for a value of another type."""
    if not isinstance(given, kind):
        expected = kind.__name__ if isinstance(kind, type) else str(kind).replace(" |", " or")
        raise RequestError(f"{name} is {given!r:.100}; it must be of type {expected}.", field=name)


def chats_of(given: Any) -> list[Sequence[Mapping[str, Any]]]:
    """One conversation or many."""
    if not isinstance(given, Sequence):
        raise RequestError(
            f"messages is {given!r:.100}; it must be a list of messages, or a list of such lists.",
            field="messages",
        )
    is_one = not given or isinstance(given, str) or isinstance(given[0], Mapping)
    return [given] if is_one else list(given)


def adapters_by_name(requests: Sequence[LoRARequest | None]) -> dict[str, LoRARequest]:
    """What each adapter's name means in one call. One that says no more than the name means what
    the others of that name do."""
    found: dict[str, LoRARequest] = {}
    for request in requests:
        if request is None:
            continue
        name = request.lora_name
        one = found.get(name, request)
        for what in ("lora_int_id", "lora_path"):
            mine, other = getattr(request, what), getattr(one, what)
            if mine and other and mine != other:
                raise RequestError(
                    f"adapter {name!r} comes with the {what} {other!r} and {mine!r} in one call; "
                    "give each its own name.",
                    field="lora_request",
                )
        found[name] = LoRARequest(
            name,
            one.lora_int_id if one.lora_int_id is not None else request.lora_int_id,
            one.lora_path or request.lora_path,
            load_inplace=one.load_inplace or request.load_inplace,
        )
    return found
