"""What a simulated engine is set to; names and limits are those of the real one's settings."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.planes import Capacity
from manyroots.cache.policies import CachePolicies, Eviction, Prefetch, WriteBack
from manyroots.cache.split import Demand
from manyroots.config import CacheSettings, SchedulerSettings
from manyroots.errors import ConfigError
from manyroots.lora.limits import MAX_OPEN_SLOTS, SPARE_SLOTS, AdapterLimits, DeviceBlocks
from manyroots.scheduler.one_memory import SharedSizes
from manyroots.simulate.costs import CostModel
from manyroots.simulate.traffic import TraceSequence
from manyroots.simulate.windows import (
    longest_request,
    parse_windows,
    told_split,
    window_capacities,
)
from manyroots.speculative_config import MAX_DRAFT_TOKENS

BLOCK_BYTES = 2 << 20
"""Of a GPU's memory for adapters."""
MAX_MODEL_LEN = 32768
"""With windows, unless it is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """An engine's settings, as far as they decide anything here."""

    block_size: int = 16
    num_pages: int | None = None
    """None is what the cost model's memory holds."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int | None = None
    enable_prefix_caching: bool = True
    depth: int = 1
    """How many steps are planned ahead of the one that runs."""
    num_host_pages: int = 0
    """0 is no host tier."""
    eviction: str = Eviction.FORKS.value
    write_back: str = "through"
    storage: bool = False
    """Whether pages go on from the host to storage, and come back."""
    prefetch: str = "wait"
    prefetch_timeout_steps: int = 32
    max_loras: int = 0
    max_cpu_loras: int = 0
    num_spare_slots: int | None = None
    """Slots beyond --max-loras; None is as many as the engine has, memory aside."""
    adapter_memory_bytes: float | None = None
    """Device memory that adapters share, as with --max-loras auto; None is no limit."""
    one_memory: bool = False
    """Whether that memory and the pages' are one: what is evicted next, of either, has one price.
    The two sizes are then how the run begins."""
    scheduling_policy: str = "fcfs"
    adapter_quantum_steps: int | None = None
    num_speculative_tokens: int = 0
    """The longest draft of one row and step, up to 8; 0 guesses nothing."""
    acceptance: float = 0.7
    """The probability that a guess is right if all before it are."""
    windows: tuple[str, ...] = ()
    """Layers that see a window only, as `512:5/6` (SIZE:SHARE). `num_pages` is then memory for so
    many pages of all layers, split as the engine splits its own."""
    max_model_len: int | None = None
    """With windows or one memory: the longest request to plan for, or what fits; None is
    MAX_MODEL_LEN."""
    families: tuple[Capacity, ...] = ()
    """Other kinds of layers, with room of their own, in place of full attention alone."""

    def __post_init__(self) -> None:
        CacheSettings(block_size=self.block_size)  # refuses what the engine would refuse
        if not 0 <= self.num_speculative_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(
                f"--speculate is {self.num_speculative_tokens}; it must be from 0 to "
                f"{MAX_DRAFT_TOKENS}."
            )
        scheduler = self.scheduler()
        if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) is below "
                f"--max-num-seqs ({self.max_num_seqs}): a step could not give every running "
                "request one token. Raise the first or lower the second."
            )
        if not 0.0 <= self.acceptance <= 1.0:
            raise ConfigError(f"--acceptance is {self.acceptance}; it must be from 0 to 1.")
        if self.num_pages is not None and self.num_pages < 1:
            raise ConfigError(f"--num-pages is {self.num_pages}; it must be at least 1.")
        if self.num_host_pages < 0:
            raise ConfigError(f"--num-host-pages is {self.num_host_pages}; 0 is no host tier.")
        _one_of("--eviction", self.eviction, [policy.value for policy in Eviction])
        _one_of("--write-back", self.write_back, [policy.value for policy in WriteBack])
        _one_of("--prefetch", self.prefetch, [policy.value for policy in Prefetch])
        if self.prefetch_timeout_steps < 0:
            raise ConfigError(
                f"--prefetch-timeout-steps is {self.prefetch_timeout_steps}; it must be at least 0."
            )
        if self.storage and not self.has_host:
            raise ConfigError(
                "--storage needs a host tier, through which its pages pass: give --num-host-pages."
            )
        parse_windows(self.windows)
        if self.windows and (self.families or self.num_host_pages):
            raise ConfigError("--window goes with neither --num-host-pages nor other families.")
        if self.adapter_memory_bytes is not None:
            if self.max_loras:
                raise ConfigError(
                    "--adapter-memory is what adapters share if no number of them is given; leave "
                    "out --max-loras."
                )
            if self.adapter_memory_bytes < BLOCK_BYTES:
                raise ConfigError(
                    f"--adapter-memory is {self.adapter_memory_bytes:.0f} bytes; a block has "
                    f"{BLOCK_BYTES}. Raise it."
                )
        if self.one_memory and (self.adapter_memory_bytes is None or self.families or self.windows):
            raise ConfigError(
                "--one-memory needs --adapter-memory, and pages of full attention alone: give the "
                "first, and leave out --window."
            )
        self.adapter_limits()
        if self.depth not in (0, 1):
            raise ConfigError(f"depth is {self.depth}; it must be 0 or 1.")

    def scheduler(self) -> SchedulerSettings:
        return SchedulerSettings(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            scheduling_policy=self.scheduling_policy,
            adapter_quantum_steps=self.adapter_quantum_steps,
            speculative_config=self._speculative_config(),
        )

    def _speculative_config(self) -> str | None:
        """Guesses come from the trace, and any text is searched for none."""
        if not self.num_speculative_tokens:
            return None
        return json.dumps(
            {"method": "suffix", "num_speculative_tokens": self.num_speculative_tokens}
        )

    @property
    def has_host(self) -> bool:
        if self.families:
            return any(capacity.num_host_units for capacity in self.families)
        return self.num_host_pages > 0

    def capacities(self) -> tuple[Capacity, ...]:
        assert self.num_pages is not None
        if self.windows:
            return window_capacities(
                self.windows, self.num_pages, self._demand(self.num_cache_tokens)
            )
        full = Capacity(FULL_ATTENTION, self.num_pages, self.num_host_pages)
        return self.families or (full,)

    def shared_sizes(self, page_bytes: int) -> SharedSizes | None:
        """What pages and adapters share, if they do."""
        if not self.one_memory:
            return None
        assert self.adapter_memory_bytes is not None
        num_step_pages = -(-self.max_num_batched_tokens // self.block_size)
        return SharedSizes(
            unit_bytes=page_bytes,
            num_lent_units=int(self.adapter_memory_bytes) // page_bytes,
            least_units=-(-self.num_cache_tokens // self.block_size),
            num_step_units=num_step_pages,
        )

    def adapter_limits(self) -> AdapterLimits:
        if self.adapter_memory_bytes is not None:
            num_blocks = int(self.adapter_memory_bytes) // BLOCK_BYTES
            num_slots = MAX_OPEN_SLOTS if self.one_memory else min(num_blocks, MAX_OPEN_SLOTS)
            blocks = DeviceBlocks(num_blocks, BLOCK_BYTES, num_slots)
            return AdapterLimits(max_loras=0, max_cpu_loras=self.max_cpu_loras, blocks=blocks)
        num_spare = self.num_spare_slots
        if num_spare is None:
            num_spare = self.max_loras // SPARE_SLOTS
        if self.max_cpu_loras:
            num_spare = max(0, min(num_spare, self.max_cpu_loras - self.max_loras))
        return AdapterLimits(
            max_loras=self.max_loras,
            max_cpu_loras=self.max_cpu_loras,
            num_spare_slots=num_spare if self.max_loras else 0,
        )

    def policies(self) -> CachePolicies:
        """What loading and computing cost is measured as the run goes on, as in the engine."""
        return CachePolicies(
            reuse=self.enable_prefix_caching,
            eviction=Eviction(self.eviction),
            write_back=WriteBack(self.write_back),
            uses_storage=self.storage,
            prefetch=Prefetch(self.prefetch),
            prefetch_timeout_steps=self.prefetch_timeout_steps,
        )

    def with_pages(self, costs: CostModel) -> SimulationSettings:
        """The same with the number of pages settled."""
        if self.num_pages is not None:
            return self
        num_pages = costs.num_pages(self.block_size)
        if num_pages < 1:
            raise ConfigError(
                f"kv_memory_bytes is {costs.kv_memory_bytes:.0f}, less than one page of "
                f"{self.block_size} tokens. Raise it, lower --block-size, or give --num-pages."
            )
        return dataclasses.replace(self, num_pages=num_pages)

    @property
    def num_cache_tokens(self) -> int:
        """The longest sequence served: as many tokens as all pages hold together, or with windows
        more, since only some layers have pages for all of them."""
        assert self.num_pages is not None
        if self.windows:
            most = self.max_model_len or MAX_MODEL_LEN
            return longest_request(self.windows, self.num_pages, self._demand(most))
        num_tokens = self.num_pages * self.block_size
        if self.one_memory:  # of which pages keep enough for the longest request
            num_tokens = min(num_tokens, self.max_model_len or MAX_MODEL_LEN)
        return num_tokens

    def told_split(self, costs: CostModel) -> list[str]:
        """What each family of layers got of the memory; nothing to tell where there is one."""
        if not self.windows or self.num_pages is None:
            return []
        page_bytes = self.block_size * costs.kv_bytes_per_token
        demand = self._demand(self.num_cache_tokens)
        return told_split(self.windows, self.num_pages, page_bytes, demand)

    def _demand(self, max_model_len: int) -> Demand:
        num_step_tokens = self.max_num_batched_tokens
        return Demand(
            page_size=self.block_size,
            max_model_len=max_model_len,
            num_step_tokens=num_step_tokens,
            num_chunk_tokens=min(
                num_step_tokens, self.long_prefill_token_threshold or num_step_tokens
            ),
        )

    def check_fits(self, sequence: TraceSequence) -> None:
        """Refuse, as the input processor would, what could never finish."""
        if sequence.num_tokens > self.num_cache_tokens:
            raise ConfigError(
                f"a request of the trace (arrival {sequence.line.arrival_s}) has "
                f"{sequence.num_tokens} tokens with its output, and the cache holds "
                f"{self.num_cache_tokens} ({self.num_pages} pages of {self.block_size}). "
                "Raise --num-pages."
            )


def _one_of(flag: str, value: str, choices: list[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{flag} is {value!r}; choose one of {', '.join(choices)}.")
