"""What vLLM's users write as JSON about speculation, in this engine's own words.

Takes the text of --speculative-config; gives what drafts may be made, or an error that names the
part that is not served. Form of vLLM 0.28.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from manyroots.errors import ConfigError

_FLAG = "--speculative-config"
MAX_DRAFT_TOKENS = 8
"""Of one row and step. Longer drafts gain little: each position needs all before it to be right."""
_PREDICTED = (
    "mtp", "deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp", "qwen3_5_mtp"
)  # fmt: skip
"""vLLM's general name, and its names by architecture."""
_NUMBERS = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")


@dataclass(frozen=True, slots=True)
class SpeculationChoice:
    """Which drafts are made, and how long they may be."""

    num_tokens: int = 4
    """At most, of one row and step."""
    uses_namespace: bool = True
    """Whether drafts come from the namespace's recent output too, beside the request's own text."""
    longest_match: int = 16
    """Tokens that are compared with earlier text."""
    shortest_match: int = 3
    """Fewer equal tokens make no draft."""
    is_adaptive: bool = True
    """Whether drafts stop while they do not pay."""
    is_predicted: bool = False
    """Whether drafts come from the model's prediction layer instead of earlier text."""


def parse_speculation(text: str) -> SpeculationChoice:
    """What a --speculative-config means here."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{_FLAG} is not JSON ({error}).") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{_FLAG} must be an object of JSON, as {{'method': 'suffix'}}.")
    method = given.pop("method", None)
    is_predicted = method in _PREDICTED
    if method not in ("suffix", "ngram") and not is_predicted:
        raise ConfigError(
            f"{_FLAG} has method {method!r}; this engine serves 'suffix' and 'ngram', which need "
            "no draft model, and 'mtp' for models with a prediction layer."
        )
    is_adaptive = given.pop("adaptive", True)
    if not isinstance(is_adaptive, bool):
        raise ConfigError(f"{_FLAG}: adaptive is {is_adaptive!r}; it must be true or false.")
    taken = _NUMBERS[:1] if is_predicted else _NUMBERS
    numbers = {name: given.pop(name) for name in taken if name in given}
    if given:
        raise ConfigError(f"{_FLAG} has {', '.join(sorted(given))}; this is not served. Remove it.")
    defaults = SpeculationChoice()
    shortest, longest = defaults.shortest_match, defaults.longest_match
    if method == "ngram":
        shortest, longest = 1, 5
    return SpeculationChoice(
        num_tokens=_number(
            numbers, "num_speculative_tokens", 1 if is_predicted else 4, MAX_DRAFT_TOKENS
        ),
        uses_namespace=method == "suffix",
        longest_match=(most := _number(numbers, "prompt_lookup_max", longest, 64)),
        shortest_match=_number(numbers, "prompt_lookup_min", min(shortest, most), most),
        is_adaptive=is_adaptive,
        is_predicted=is_predicted,
    )


def _number(given: dict[str, Any], name: str, default: int, most: int) -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{_FLAG}: {name} is {value!r}; it must be from 1 to {most}.")
    return value
