"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch
import transformers

from manyroots.version import __version__


def describe_machine() -> dict[str, object]:
    """Facts that make two figures comparable, or not."""
    facts: dict[str, object] = {
        "manyroots": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cpu_instructions": _cpu_instructions(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


_ARM_PARTS = {
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
}
"""Arm's own numbers of the cores that servers have."""
_TELLING = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "bf16", "i8mm", "asimddp", "asimdhp")
"""Instructions that decide how fast products are."""


def _cpu_name() -> str:
    facts = _cpu_facts()
    part = facts.get("CPU part", "")
    return facts.get("model name") or _ARM_PARTS.get(part) or platform.machine()


def _cpu_instructions() -> list[str]:
    facts = _cpu_facts()
    found = (facts.get("flags") or facts.get("Features") or "").split()
    return [name for name in _TELLING if name in found]


def _cpu_facts() -> dict[str, str]:
    """Of the first core."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return {}
    first = cpuinfo.read_text().split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
