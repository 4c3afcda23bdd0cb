"""Traces that a server writes of its own traffic: pages by digest, without a token.

    {"arrival": 1.5, "page_size": 16, "pages": [81, 7, 90], "prompt_tokens": 40,
     "output_tokens": 8, "adapter": null, "tenant": 0, "ends_by": "stop"}

`pages` are those of prompt and output together, the last maybe not full; a number stands for the
tokens of a page and of all before it. So a later prompt that quotes an answer shares its pages,
too. `tenant` 0 is no tenant.
"""

from __future__ import annotations

import math
from typing import Any

from manyroots.errors import ConfigError
from manyroots.sampling import MAX_TOKENS_LIMIT
from manyroots.simulate.trace import EndsBy, TraceRequest, TraceSegment

FIELDS = (
    "arrival", "page_size", "pages", "prompt_tokens", "output_tokens", "adapter", "tenant",
    "ends_by",
)  # fmt: skip
MAX_PAGE_SIZE = 4096


def is_page_trace(values: dict[str, Any]) -> bool:
    """Whether a trace that begins with this line is one of these."""
    return "page_size" in values


def parse_page_line(values: dict[str, Any], where: str) -> TraceRequest:
    """One line, checked; `where` begins every error message."""
    for name in FIELDS:
        if name not in values:
            raise ConfigError(
                f"{where}: {name} is missing; a line of a server's trace has {', '.join(FIELDS)}."
            )
    arrival, ends_by, adapter = values["arrival"], values["ends_by"], values["adapter"]
    is_number = isinstance(arrival, int | float) and not isinstance(arrival, bool)
    if not is_number or not math.isfinite(arrival) or arrival < 0:
        raise ConfigError(
            f"{where}: arrival is {arrival!r}; it must be a number of seconds, at least 0."
        )
    if adapter is not None and (not isinstance(adapter, str) or not adapter):
        raise ConfigError(f"{where}: adapter is {adapter!r}; it must be a name or null.")
    if ends_by not in [way.value for way in EndsBy]:
        raise ConfigError(f"{where}: ends_by is {ends_by!r}; choose length or stop.")
    size = _count(values, "page_size", MAX_PAGE_SIZE, where)
    num_prompt = _count(values, "prompt_tokens", MAX_TOKENS_LIMIT, where)
    num_output = _count(values, "output_tokens", MAX_TOKENS_LIMIT, where)
    tenant = values["tenant"]
    if not isinstance(tenant, int) or isinstance(tenant, bool) or tenant < 0:
        raise ConfigError(f"{where}: tenant is {tenant!r}; it must be an integer, at least 0.")
    pages = _pages(values["pages"], size, num_prompt + num_output, where)
    return TraceRequest(
        arrival_s=float(arrival),
        prompt=_first(pages, num_prompt),
        adapter=adapter,
        salt=f"tenant {tenant}" if tenant else None,
        output_tokens=num_output,
        whole=pages,
        ends_by=EndsBy(ends_by),
    )


def page_values(line: TraceRequest) -> dict[str, Any]:
    """A line as it was read."""
    return {
        "arrival": line.arrival_s,
        "page_size": line.whole[0].length,
        "pages": [int(page.name.removeprefix("page ")) for page in line.whole],
        "prompt_tokens": line.num_prompt_tokens,
        "output_tokens": line.output_tokens,
        "adapter": line.adapter,
        "tenant": 0 if line.salt is None else int(line.salt.removeprefix("tenant ")),
        "ends_by": line.ends_by.value,
    }


def _pages(numbers: Any, size: int, num_tokens: int, where: str) -> tuple[TraceSegment, ...]:
    wanted = -(-num_tokens // size)
    if not isinstance(numbers, list) or len(numbers) != wanted:
        given = f"{len(numbers)} of them" if isinstance(numbers, list) else repr(numbers)
        raise ConfigError(
            f"{where}: pages must be a list of {wanted} numbers, one for every {size} of "
            f"{num_tokens} tokens of prompt and output, and not {given}."
        )
    for i, number in enumerate(numbers):
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ConfigError(f"{where}: pages[{i}] is {number!r}; it must be an integer from 0.")
    return tuple(TraceSegment(f"page {number}", size) for number in numbers)


def _first(pages: tuple[TraceSegment, ...], num_tokens: int) -> tuple[TraceSegment, ...]:
    """The pages that hold so many tokens, the last of them cut."""
    found: list[TraceSegment] = []
    for page in pages:
        if num_tokens <= 0:
            break
        found.append(TraceSegment(page.name, min(page.length, num_tokens)))
        num_tokens -= page.length
    return tuple(found)


def _count(values: dict[str, Any], field: str, most: int, where: str) -> int:
    value = values[field]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(f"{where}: {field} is {value!r}; it must be an integer from 1 to {most}.")
    return value
