"""Where a CPU has no instructions for bfloat16, torch's products of it take a hundred times as long
as those of float32. Here they are float32's, rounded: what instructions for bfloat16 give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.attention import torch_ops as attention
from manyroots.models.chip import this_chip
from manyroots.runner import mixed

PRODUCTS = ((F, "linear"), (torch, "mm"), (torch, "bmm"), (torch, "addmm"), (torch, "baddbmm"))
IN_PLACE = ("addmm_", "baddbmm_")


@pytest.fixture(autouse=True, scope="session")
def quick_products() -> Iterator[None]:
    if torch.cuda.is_available() or not this_chip().is_slow_at(torch.bfloat16):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for room, name in (*PRODUCTS, (attention, "_fused")):
            patch.setattr(room, name, _rounded(getattr(room, name)))
        for name in IN_PLACE:
            product, kept = getattr(torch, name.removesuffix("_")), getattr(Tensor, name)
            patch.setattr(Tensor, name, _in_place(product, kept))
        yield


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """References take their time for every token, padding's as well."""
    for name in ("TOKENS", "TOKENS_BESIDE_FEW"):
        monkeypatch.setattr(mixed, name, range(8, 1025, 8))


def _is_slow(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.bfloat16 and value.is_cpu


def _rounded(product: Callable[..., Any]) -> Callable[..., Any]:
    """Computes in float32 what is given in bfloat16, and rounds the result to it."""

    def wide(value: Any) -> Any:
        return value.float() if _is_slow(value) else value

    def call(*args: Any, out: Tensor | None = None, **options: Any) -> Any:
        if not _is_slow(args[0]):
            return product(*args, **options, **({} if out is None else {"out": out}))
        given = product(*map(wide, args), **{name: wide(each) for name, each in options.items()})
        if isinstance(given, tuple):  # attention, and its sums, which are in float32 in any case
            return given[0].bfloat16(), *given[1:]
        return given.bfloat16() if out is None else out.copy_(given)

    return call


def _in_place(product: Callable[..., Tensor], kept: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(y: Tensor, *args: Any, **options: Any) -> Tensor:
        return y.copy_(product(y, *args, **options)) if _is_slow(y) else kept(y, *args, **options)

    return call
