"""How many adapters each tier has room for; what can't work is refused at start.

The device is counted in blocks of memory, or in adapters where --max-loras is a number. The host is
counted in adapters. Storage is where adapters come from and has no limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyroots.errors import ConfigError
from manyroots.lora.spec import AdapterSpec

MAX_OPEN_SLOTS = 4096
"""Most adapters on a device with --max-loras auto, however small: tables have a row for each."""
SPARE_SLOTS = 4
"""For so many adapters that may run at once there is one slot more, into which the next one's
weights come before memory is freed for it."""


@dataclass(frozen=True, slots=True)
class DeviceBlocks:
    """Device memory that adapters share, each with as many blocks as its own ranks need."""

    num_blocks: int
    """At start, and for good unless pages use the same memory."""
    block_bytes: int
    num_slots: int
    """As many adapters have a slot at most, however small they are."""


def num_spare(num_blocks: int) -> int:
    """Where not all adapters fit into so many blocks, running ones leave these, to load the next
    one ahead."""
    return num_blocks // (SPARE_SLOTS + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLimits:
    """Sizes of the tiers; 0 means no limit."""

    max_loras: int
    """Most distinct adapters in one step."""
    max_cpu_loras: int
    """Most adapters in host memory."""
    num_spare_slots: int = 0
    """Device slots beyond `max_loras`, so that the next adapter can load while a full step runs."""
    blocks: DeviceBlocks | None = None
    """None: a slot has room for the largest adapter, and slots alone are counted."""

    def __post_init__(self) -> None:
        _not_negative("--max-loras", self.max_loras)
        _not_negative("--max-cpu-loras", self.max_cpu_loras)
        _not_negative("the number of spare adapter slots", self.num_spare_slots)
        num_slots = self.max_loras + self.num_spare_slots
        if self.max_loras and 0 < self.max_cpu_loras < num_slots:
            raise ConfigError(
                f"--max-cpu-loras is {self.max_cpu_loras}, fewer than the {num_slots} device slots "
                f"that --max-loras {self.max_loras} asks for; an adapter on the device keeps its "
                f"copy in host memory. Raise --max-cpu-loras to at least {num_slots} (0 for no "
                "limit) or lower --max-loras."
            )

    @property
    def num_slots(self) -> int | None:
        """Device slots; None if they are made as needed.

        Without a cap on a step, host memory is what limits the device: each slot's adapter is
        there too.
        """
        if self.max_loras:
            return self.max_loras + self.num_spare_slots
        if self.blocks is not None:
            return min(self.blocks.num_slots, self.max_cpu_loras or self.blocks.num_slots)
        return self.max_cpu_loras or None

    def num_blocks(self, spec: AdapterSpec) -> int:
        """What an adapter takes of the device's blocks; 0 where slots alone are counted."""
        if self.blocks is None:
            return 0
        size = spec.num_bytes if spec.device_bytes is None else spec.device_bytes
        return -(-size // self.blocks.block_bytes)

    @property
    def num_host_copies(self) -> int | None:
        """Adapters in host memory; None for no limit."""
        return self.max_cpu_loras or None


def _not_negative(what: str, value: int) -> None:
    if value < 0:
        raise ConfigError(f"{what} is {value}; it must be at least 0, which means no limit.")
