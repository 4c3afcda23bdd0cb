"""How near a measured case comes to its floors: bytes of a decode step, operations of its prompts.

Takes a model's shape and the case's figures; gives rates and, where the device's ceilings were
measured, the shares of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from manyroots.bench.random_adapters import chosen, targets_of
from manyroots.config import ModelSettings
from manyroots.lora.targets import Target
from manyroots.messages import EngineInfo
from manyroots.models.load import describe
from manyroots.models.quantization import itemsizes_on
from manyroots.models.roofline import Roofline
from manyroots.models.source import resolve_source


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What a device was measured to reach at best."""

    bytes_per_s: float
    flops_per_s: float
    """In the products of bfloat16 matrices."""


CEILINGS = {"H200": Ceiling(4.25e12, 790e12)}
"""By a part of the device's name: a copy on the device, and large products."""


def ceiling_of(device_name: str) -> Ceiling | None:
    """None: nothing was measured on such a device, so no share can be said."""
    return next((found for name, found in CEILINGS.items() if name in device_name), None)


class Floors:
    """Of one engine's model on its device."""

    def __init__(self, model: ModelSettings, info: EngineInfo, rank: int, *, experts: bool) -> None:
        """`rank` and `experts`: of the adapters."""
        self._source = resolve_source(model)
        self._rank, self._experts = rank, experts
        dtype: torch.dtype = getattr(torch, info.dtype)
        sizes = itemsizes_on(
            torch.device(info.device), self._source.config, model.quantization, dtype
        )
        self._roofline = Roofline(describe(self._source), dtype, *sizes)
        self._ceiling: Ceiling | None = None
        if info.device.startswith("cuda"):
            self._ceiling = ceiling_of(torch.cuda.get_device_name(info.device))

    @cached_property
    def _targets(self) -> list[Target]:
        return list(chosen(targets_of(self._source), experts=self._experts).values())

    def beside(self, case: dict[str, Any], output_len: int) -> dict[str, float]:
        """What belongs beside a case's figures."""
        batch, prompt_len, line = case["batch"], case["prompt_len"], self._roofline
        num_bytes = line.decode_bytes(batch, prompt_len + output_len / 2)
        if case["adapters"]:
            num_bytes += line.adapter_bytes(self._targets, self._rank, case["adapters"], batch)
        flops = line.prompt_flops(batch, prompt_len)
        bytes_per_s = num_bytes / case["ms_per_step"] * 1e3
        flops_per_s = flops / case["prefill_s"]
        beside = {
            "decode_gb_per_step": round(num_bytes / 1e9, 6),
            "decode_gb_per_s": round(bytes_per_s / 1e9, 3),
            "prefill_tflop": round(flops / 1e12, 4),
            "prefill_tflop_per_s": round(flops_per_s / 1e12, 9),
        }
        if self._ceiling is not None:
            beside["decode_share"] = round(bytes_per_s / self._ceiling.bytes_per_s, 3)
            beside["prefill_share"] = round(flops_per_s / self._ceiling.flops_per_s, 3)
        return beside


def described(beside: dict[str, float]) -> str:
    """A line for the terminal."""
    shares = ["", ""]
    if "decode_share" in beside:
        shares = [
            f", {beside[f'{name}_share']:.2f} of the ceiling" for name in ("decode", "prefill")
        ]
    return (
        f"decode {beside['decode_gb_per_step']:.2f} GB a step, {beside['decode_gb_per_s']:.1f} "
        f"GB/s{shares[0]}; prefill {beside['prefill_tflop_per_s']:.3f} TFLOP/s{shares[1]}"
    )
