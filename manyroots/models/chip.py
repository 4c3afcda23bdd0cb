"""This machine's CPU: its name, and the instructions that determine the speed of products.

Takes torch's description of the chip or, if torch has none, Linux's /proc/cpuinfo; gives a `Chip`,
whose instructions have Linux's names. It also asks torch's library whether it uses those for
bfloat16: a chip may have instructions that a build of torch does not use.
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
"""Arm's part numbers of server cores."""
BF16_PRODUCTS = ("amx_bf16", "avx512_bf16", "bf16")
"""Instructions that multiply and add bfloat16 at twice float32's rate or more; the last is Arm's.
AVX-512 without them converts every number to float32 first, which gains nothing."""
FP16_PRODUCTS = ("amx_fp16", "avx512_fp16")
"""The same for float16. Arm's `asimdhp` is not among them: with it torch's float16 products took
fifteen times as long as float32 (Neoverse-N1)."""
TELLING = (*BF16_PRODUCTS, *FP16_PRODUCTS, "avx512f", "avx2", "i8mm", "asimddp", "asimdhp")
"""Instructions that determine the speed of products."""
_TORCH_NAMES = {"avx512_f": "avx512f", "dot": "asimddp", "fp16_arith": "asimdhp"}
"""Torch's names that differ."""


@dataclass(frozen=True, slots=True)
class Chip:
    """A CPU, or the description of one."""

    name: str
    instructions: frozenset[str]
    """A subset of `TELLING`."""
    library_has_bf16: bool
    """Whether torch's library multiplies bfloat16 here without falling back to plain loops."""

    @property
    def bf16_products(self) -> str | None:
        """The fastest bfloat16 instructions in use; None if there are none."""
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
    """`capabilities` are torch's and win if there are any; `cpuinfo` is Linux's."""
    known = {_TORCH_NAMES.get(name, name) for name, has in capabilities.items() if has is True}
    flags = (cpuinfo.get("flags") or cpuinfo.get("Features") or "").split()
    found = known or set(flags)
    name = cpuinfo.get("model name") or _ARM_PARTS.get(cpuinfo.get("CPU part", ""))
    return Chip(name or platform.machine(), frozenset(found & {*TELLING}), library_has_bf16)


def read_cpuinfo() -> dict[str, str]:
    """Linux's description of the first core; empty on other systems."""
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
