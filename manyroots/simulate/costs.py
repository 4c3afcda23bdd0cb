"""How long things take: one frozen set of numbers, and the arithmetic on them.

A step takes a fixed time, plus a time per prompt token and per (token, earlier token) pair of the
prompts, plus a time per decoding row and per token that those rows look back on. A guessed
position is a row of its own, as in the engine. Linear on purpose: every number can be read off a
benchmark. `presets.py` has measured ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from manyroots.errors import ConfigError
from manyroots.ids import Tier


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What one step computes, counted."""

    num_prefill_tokens: int
    """Tokens of rows that compute more than one, and have no draft."""
    num_prefill_pairs: int
    """For each of those, the tokens it attends to, itself included; all added up."""
    num_decode_rows: int
    """Rows that compute one token, and guessed positions."""
    num_context_tokens: int
    """Tokens those rows attend to, added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Speeds and sizes of one model on one machine."""

    step_overhead_s: float
    """Every step: reading the weights, launching, sampling."""
    unoverlapped_step_s: float
    """From a result to the start of a step that is planned after it, as while guesses are made:
    the device idles meanwhile. A step that is planned while another runs has none of it."""
    prefill_tokens_per_s: float
    prefill_pair_s: float
    """Attention within long prompts, which grows with the square of their length."""
    decode_row_s: float
    decode_context_token_s: float
    """Reading one token's keys and values."""

    kv_bytes_per_token: float
    kv_memory_bytes: float
    """Device memory for pages; gives the number of pages where none is asked for."""

    host_bytes_per_s: float
    """Between device and host, each way."""
    host_latency_s: float
    storage_bytes_per_s: float
    """Between host and storage, each way."""
    storage_latency_s: float

    adapter_bytes: float
    adapter_storage_load_s: float
    """First use of an adapter that is on no other tier: read, check, copy to the device."""

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            must_be_positive = spec.name.endswith(("_per_s", "_bytes", "_per_token"))
            low_is_good = value > 0 if must_be_positive else value >= 0
            if not math.isfinite(value) or not low_is_good:
                wanted = "a finite number above 0" if must_be_positive else "finite and at least 0"
                raise ConfigError(f"cost {spec.name} is {value}; it must be {wanted}.")

    def step_s(self, load: StepLoad) -> float:
        return (
            self.step_overhead_s
            + load.num_prefill_tokens / self.prefill_tokens_per_s
            + load.num_prefill_pairs * self.prefill_pair_s
            + load.num_decode_rows * self.decode_row_s
            + load.num_context_tokens * self.decode_context_token_s
        )

    def num_pages(self, page_size: int) -> int:
        """How many pages fit into the memory for them."""
        return int(self.kv_memory_bytes // (self.kv_bytes_per_token * page_size))

    def transfer_s(self, lower: Tier, num_bytes: float) -> float:
        """Between `lower` and the tier above it, with nothing else on the way."""
        if lower is Tier.HOST:
            return self.host_latency_s + num_bytes / self.host_bytes_per_s
        if lower is Tier.STORAGE:
            return self.storage_latency_s + num_bytes / self.storage_bytes_per_s
        raise ValueError("no tier is above the device; name the lower end of the transfer")

    def adapter_load_s(self, found_on: Tier) -> float:
        """Until an adapter found on this tier can be computed with."""
        if found_on is Tier.DEVICE:
            return 0.0
        if found_on is Tier.HOST:
            return self.transfer_s(Tier.HOST, self.adapter_bytes)
        return self.adapter_storage_load_s


def with_costs(costs: CostModel, changes: Mapping[str, float]) -> CostModel:
    """The same with some numbers replaced; an unknown name is an error."""
    known = [spec.name for spec in dataclasses.fields(CostModel)]
    for name in changes:
        if name not in known:
            raise ConfigError(f"no cost is called {name!r}; choose one of {', '.join(known)}.")
    return dataclasses.replace(costs, **changes)
