"""Products with weights, the one place that multiplies by one.

Takes activations [num_tokens, in]; gives a `Product` of [num_tokens, out]. Several projections of
one input are kept in one weight, so that they are one product; each is still a destination of its
own for the loader. Adapters attach here: a product is one site, and `lora_parts` says under which
names. Knows nothing of what the weights mean.

Where the slots are few and their ranks small (`BESIDE_SHARE`), all slots' A lie behind the weight's
rows: one product gives both, at the price of a few columns more. To find each row's own A takes a
kernel of its own longer to launch and to wait for, and tiles of their own more than their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.distributed.shard import Shard
from manyroots.kernels.choice import Kernels
from manyroots.kernels.fp8_rows import Fp8Form, values_of
from manyroots.kernels.lora_sites.sites import LinearSite, LoraRows, LoraTerm
from manyroots.kernels.norm.undivided import Rows, UndividedNorm
from manyroots.kernels.scaled import ScaledMatrix
from manyroots.layers.product import Product
from manyroots.layers.step import Step
from manyroots.layers.weights.fill import Fill, Fills, Side
from manyroots.layers.weights.weight import Weight
from manyroots.lora.targets import OutputPiece, TargetKind
from manyroots.store.adapter_sites import LoraSite, SitePart

BESIDE_SHARE, BESIDE_NUMBERS = 10, 2_500_000
"""All slots' A together have at most one row for so many of the weight, and so many numbers: to
multiply 1280 rows with them takes a large GPU 9 us, and a kernel for the rows' own 13."""
MOST_BESIDE, LEAST_BESIDE = 0, 129
"""Rows of a step. Between them a kernel multiplies with each block's own A in the same launch. For
up to 64 rows all slots' A were as right, but not measured to be faster by themselves: none are."""
TILE_ROWS, AT_ONCE = 64, 132
"""Of a weight in products of few rows, and how many tiles a large GPU has at a time: one more takes
as long again."""


class Linear:
    """y = x W^T + b, and what adapters add."""

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        side: Side | None,
        pieces: Mapping[str, tuple[OutputPiece, ...]] | None = None,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        may_be_quantized: bool = True,
    ) -> None:
        """`parts`: this rank's width of each projection, by name; "" where there is one. `side`:
        which side of them ranks divide. `pieces`: what a projection's output consists of, by its
        name, where ranks divide that piece by piece. `may_be_quantized`: not what few numbers
        decide."""
        out_features = sum(parts.values())
        self.weight = Weight(
            in_features, out_features, dtype=dtype, device=device,
            may_be_quantized=may_be_quantized,
        )  # fmt: skip
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self.site = LoraSite(TargetKind.LINEAR, in_features, parts, pieces=pieces)
        self.pooled: LinearSite | None = None
        """Where adapters' weights for it lie; None in a model without adapters."""
        self.beside: Tensor | None = None
        """Memory for all slots' A [num_slots, parts * highest rank, in], behind the weight."""
        self._wide: Tensor | None = None
        """The weight and that."""
        self._fits_beside = False
        """Whether all tiles of that run at once where those of the weight do."""
        ends = list(accumulate(parts.values()))
        self._rows = {
            name: slice(end - size, end)
            for (name, size), end in zip(parts.items(), ends, strict=True)
        }
        self._side, self._shard, self._pieces = side, shard, dict(pieces or {})
        self._kernels = kernels

    def __call__(self, x: Rows, step: Step) -> Product:
        rows = None if self.pooled is None else step.lora
        gemm, operand = self._kernels.gemm, self.weight.operand
        if self.pooled is not None and rows is not None and self._takes_all_slots(rows):
            return self._with_all_slots(x, self.pooled, rows)
        if isinstance(x, UndividedNorm) or self._is_own(x.shape[0], has_adapters=rows is not None):
            return Product(*gemm.linear(x, operand, self.pooled, rows, self.bias))
        if self.pooled is None or rows is None:
            return Product(self.weight.times(x, self.bias, self._kernels.scaled_gemm))
        sums = self.weight.times(x, self.bias, self._kernels.scaled_gemm)
        return Product(sums, self._kernels.lora_sites.shrink(values_of(x), self.pooled, rows))

    def _takes_all_slots(self, rows: LoraRows) -> bool:
        num_rows = rows.slots.shape[0]
        if self._wide is None or MOST_BESIDE < num_rows < LEAST_BESIDE:
            return False
        return num_rows >= LEAST_BESIDE or self._fits_beside

    def _with_all_slots(self, x: Rows, site: LinearSite, rows: LoraRows) -> Product:
        gemm, wide = self._kernels.gemm, self._wide
        assert wide is not None
        if isinstance(x, UndividedNorm) or gemm.is_for(x.shape[0], wide, None):
            both, _ = gemm.linear(x, wide)
        else:
            both = F.linear(values_of(x), wide).unsqueeze(0)
        out_features = sum(site.part_sizes)
        sums, hidden = both[..., :out_features], both[..., out_features:]
        return Product(sums, LoraTerm(hidden, site, rows, slot_columns=site.width))

    def make_room_beside(self, num_slots: int, max_rank: int) -> None:
        """Memory for all slots' A behind its weight, but where they would be too many, or the
        library does not compute it as it is."""
        data, width = self.weight.data, len(self._rows) * max_rank
        is_plain = isinstance(data, Tensor) and data.is_contiguous() and self.bias is None
        num_rows = num_slots * width
        too_many = num_rows * BESIDE_SHARE > data.shape[0]
        too_many |= num_rows * data.shape[1] > BESIDE_NUMBERS
        if not is_plain or too_many or not self._shard.is_whole or num_slots == 0:
            return
        self._wide = self.weight.widen(num_rows)
        tiles, more = (-(-of.shape[0] // TILE_ROWS) for of in (data, self._wide))
        self._fits_beside = not any(tiles * cuts <= AT_ONCE < more * cuts for cuts in (1, 2))
        self.beside = self._wide[data.shape[0] :].view(num_slots, width, -1)

    def takes_undivided(self, num_rows: int) -> bool:
        """Whether it can read rows, some of them with adapters, of which a norm left the division
        to it."""
        return self._is_own(num_rows, has_adapters=self.pooled is not None)

    def form(self, num_rows: int) -> Fp8Form | None:
        """What it wants so many rows in, if not as they are."""
        operand, keeps = self.weight.operand, self.pooled is not None
        if not isinstance(operand, ScaledMatrix):
            return None
        gemm, scaled_gemm = self._kernels.gemm, self._kernels.scaled_gemm
        form: Fp8Form | None = None
        if self._is_own(num_rows, has_adapters=keeps):
            form = gemm.form_for(num_rows, operand, keeps)
        elif scaled_gemm.is_for(operand, self.weight.dtype):
            form = scaled_gemm.form_for(operand, keeps)
        return form

    def _is_own(self, num_rows: int, *, has_adapters: bool) -> bool:
        """Whether the kernel set has a product for this, or the library computes it."""
        own: bool = self._kernels.gemm.is_for(
            num_rows, self.weight.operand, self.bias, has_adapters=has_adapters
        )
        return own

    def weights(self, name: str) -> Fills:
        """Where a checkpoint's tensors for the projection `name` go, or for those in the folder
        `name`."""
        for part, rows in self._rows.items():
            own = f"{name}.{part}" if part else name
            pieces = self._pieces.get(part, ())
            for tensor, fill in self.weight.fills(own, rows, self._side, self._shard):
                yield tensor, replace(fill, pieces=pieces)
            if self.bias is None:
                continue
            if self._side is Side.INPUT:
                yield f"{own}.bias", Fill(self.bias[rows], shard=self._shard, is_first_only=True)
            else:
                cut = 0 if self._side is Side.OUTPUT else None
                yield f"{own}.bias", Fill(self.bias[rows], cut, self._shard, pieces=pieces)

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        """What adapters may change of it."""
        yield from self.site.targets(name)
