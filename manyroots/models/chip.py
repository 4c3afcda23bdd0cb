"""What this machine's CPU is: its name, and the instructions that decide how fast products are.

Takes what torch says of the chip and, where a torch says nothing, what Linux writes in
/proc/cpuinfo; gives a `Chip`, whose instructions have Linux's names. Whether torch's library uses
the ones for bfloat16 is asked of the library, too: a chip may have what a build of torch does not
know.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

_ARM_PARTS = {
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
}
"""Arm's own numbers of the cores that servers have."""
BF16_PRODUCTS = ("amx_bf16", "avx512_bf16", "bf16")
"""Instructions that multiply and add up bfloat16 at twice float32's rate or more; the last is
Arm's. AVX-512 without them turns every number into float32 first, which gains nothing."""
FP16_PRODUCTS = ("amx_fp16", "avx512_fp16")
"""The same for float16. Arm's `asimdhp` is not among them: with it torch's products of float16
took fifteen times as long as those of float32 (Neoverse-N1)."""
TELLING = (*BF16_PRODUCTS, *FP16_PRODUCTS, "avx512f", "avx2", "i8mm", "asimddp", "asimdhp")
"""Instructions that decide how fast products are."""
_TORCH_NAMES = {"avx512_f": "avx512f", "dot": "asimddp", "fp16_arith": "asimdhp"}
"""What torch calls differently."""


@dataclass(frozen=True, slots=True)
class Chip:
    """A CPU, or the description of one."""

    name: str
    instructions: frozenset[str]
    """Of `TELLING`."""
    library_has_bf16: bool
    """Whether torch's library multiplies bfloat16 here without turning to plain loops."""

    @property
    def bf16_products(self) -> str | None:
        """The fastest instructions for products of bfloat16 that are used; None: there are none."""
        if not self.library_has_bf16:
            return None
        return next((name for name in BF16_PRODUCTS if name in self.instructions), None)

    def is_slow_at(self, dtype: torch.dtype) -> bool:
        """Whether products of `dtype` take many times as long as those of float32."""
        if dtype is torch.bfloat16:
            return not self.library_has_bf16
        if dtype is torch.float16:
            return self.instructions.isdisjoint(FP16_PRODUCTS)
        return False


@cache
def this_chip() -> Chip:
    """The CPU that this process runs on."""
    ask = getattr(torch.cpu, "get_capabilities", None)  # not every torch has it
    return describe_chip(
        {} if ask is None else ask(), read_cpuinfo(), library_has_bf16=_library_has_bf16()
    )


def describe_chip(
    capabilities: Mapping[str, object], cpuinfo: Mapping[str, str], *, library_has_bf16: bool
) -> Chip:
    """`capabilities` are torch's words, and count where there are any; `cpuinfo` Linux's."""
    known = {_TORCH_NAMES.get(name, name) for name, has in capabilities.items() if has is True}
    flags = (cpuinfo.get("flags") or cpuinfo.get("Features") or "").split()
    found = known or set(flags)
    name = cpuinfo.get("model name") or _ARM_PARTS.get(cpuinfo.get("CPU part", ""))
    return Chip(name or platform.machine(), frozenset(found & {*TELLING}), library_has_bf16)


def read_cpuinfo() -> dict[str, str]:
    """What Linux says of the first core; nothing elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return {}
    first = cpuinfo.read_text().split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _library_has_bf16() -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
