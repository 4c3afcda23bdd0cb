"""The counts of several engines as one engine's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from manyroots.messages import EngineInfo, Stats

T = TypeVar("T")


def merged_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """What every replica can serve, with the room of all of them."""
    return dataclasses.replace(
        infos[0],
        max_model_len=min(info.max_model_len for info in infos),
        num_pages=sum(info.num_pages for info in infos),
        max_num_seqs=sum(info.max_num_seqs for info in infos),
    )


def merged_stats(stats: Sequence[Stats]) -> Stats | None:
    """Sums; of the page usage, the mean. None where none has counted yet."""
    if not stats:
        return None
    usage = sum(each.page_usage for each in stats) / len(stats)
    return dataclasses.replace(_summed(stats), page_usage=usage)


def _summed(parts: Sequence[T]) -> T:
    """Dataclasses of one type, field by field."""
    values = {
        spec.name: _sum([getattr(part, spec.name) for part in parts])
        for spec in dataclasses.fields(parts[0])  # type: ignore[arg-type]
    }
    return dataclasses.replace(parts[0], **values)  # type: ignore[type-var]


def _sum(values: Sequence[Any]) -> Any:
    values = [value for value in values if value is not None]
    if not values:
        return None
    first = values[0]
    if isinstance(first, bool):
        return all(values)
    if isinstance(first, dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: sum(value.get(name, 0) for value in values) for name in names}
    return _summed(values) if dataclasses.is_dataclass(first) else sum(values)
