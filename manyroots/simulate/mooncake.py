"""Traces in Mooncake's format: one JSON object per line, blocks of 512 tokens by number.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353, ...]}

`timestamp` is in milliseconds. A number of `hash_ids` stands for the tokens of a block and of all
blocks before it, so that prompts share as many blocks as they begin with alike; the last may be a
part of a block. A block becomes a segment named after its number: the same tokens everywhere.
Such traces know no adapters, no tenants and no shared replies. Other fields are left alone: traces
of other origin in this format have more of them.
"""

from __future__ import annotations

import math
from typing import Any

from manyroots.errors import ConfigError
from manyroots.sampling import MAX_TOKENS_LIMIT
from manyroots.simulate.trace import TraceRequest, TraceSegment

BLOCK_TOKENS = 512
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def is_mooncake(values: dict[str, Any]) -> bool:
    """Whether a trace that begins with this line is one of these."""
    return "hash_ids" in values


def parse_mooncake(values: dict[str, Any], where: str) -> TraceRequest:
    """One line, checked; `where` begins every error message."""
    for name in FIELDS:
        if name not in values:
            raise ConfigError(
                f"{where}: {name} is missing; a line of Mooncake's format has {', '.join(FIELDS)}."
            )
    timestamp, length = values["timestamp"], values["input_length"]
    is_number = isinstance(timestamp, int | float) and not isinstance(timestamp, bool)
    if not is_number or not math.isfinite(timestamp) or timestamp < 0:
        raise ConfigError(
            f"{where}: timestamp is {timestamp!r}; it must be a number of milliseconds, at least 0."
        )
    _check_count(length, "input_length", where)
    _check_count(values["output_length"], "output_length", where)
    return TraceRequest(
        arrival_s=timestamp / 1000,
        prompt=_blocks(values["hash_ids"], length, where),
        adapter=None,
        salt=None,
        output_tokens=values["output_length"],
    )


def _blocks(ids: Any, length: int, where: str) -> tuple[TraceSegment, ...]:
    wanted = -(-length // BLOCK_TOKENS)
    if not isinstance(ids, list) or len(ids) != wanted:
        given = f"{len(ids)} of them" if isinstance(ids, list) else repr(ids)
        raise ConfigError(
            f"{where}: hash_ids must be a list of {wanted} block numbers, one for every "
            f"{BLOCK_TOKENS} of input_length {length}, and not {given}."
        )
    for i, number in enumerate(ids):
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ConfigError(
                f"{where}: hash_ids[{i}] is {number!r}; block numbers are integers from 0 on."
            )
    last = length - (wanted - 1) * BLOCK_TOKENS
    return (
        *(TraceSegment(f"block {number}", BLOCK_TOKENS) for number in ids[:-1]),
        TraceSegment(f"block {ids[-1]}", last),
    )


def _check_count(value: Any, field: str, where: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TOKENS_LIMIT:
        raise ConfigError(
            f"{where}: {field} is {value!r}; it must be an integer from 1 to {MAX_TOKENS_LIMIT}."
        )
