"""A layer's products alone, ours as they are served and the library's, with cold weights.

Takes a model's shape, numbers of rows, and perhaps FP8 weights or adapters; gives rows of a report.
`layer` is the products of a layer in order, in which a kernel may begin before the one in front is
done. With adapters, what is timed is the product and the adapters' first halves; their second ones
are in the kernels that read it, which are timed as `readers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.bench.kernel_times import KernelCase, measured, num_copies
from manyroots.kernels.choice import Kernels, reference_kernels
from manyroots.kernels.fp8_rows import Fp8Rows, in_fp8
from manyroots.kernels.lora_ops.sites import LinearSite, LoraRows
from manyroots.kernels.packed import can_pack
from manyroots.kernels.scaled import Matrix, plain
from manyroots.layers.context import LayerContext
from manyroots.layers.deferred_output import DeferredOutput
from manyroots.layers.linear import Linear
from manyroots.layers.spec import AttentionSpec, DenseSpec
from manyroots.layers.step import Step
from manyroots.layers.weights.formats import PLAIN, PackedFormat, WeightFormat
from manyroots.layers.weights.fp8 import Fp8Format
from manyroots.models.spec import ModelSpec

MOST_CHECKED = 64
"""Rows that are compared with the reference, which takes adapters row by row."""
MOST_HEAD_ROWS = 256
"""A head multiplies the rows that sample, not a prompt's."""
LAYER = "layer"


@dataclass(frozen=True, slots=True)
class ProductShape:
    """One of a model's products."""

    name: str
    in_features: int
    parts: tuple[int, ...]
    """Widths of the projections in it."""
    is_rounded: bool = True
    """Whether FP8 weights are for it, too: not for the head."""
    follows_attention: bool = False
    """No kernel rounds its rows before it."""

    @property
    def num_weights(self) -> int:
        return self.in_features * sum(self.parts)


def shapes_of(spec: ModelSpec) -> list[ProductShape]:
    """The dense products of the first layer that attends, of the first dense feed-forward block,
    and the head. Experts' are not among them."""
    found = []
    mixers = [mixer for layer in spec.layers for mixer in layer.mixers]
    attention = next((mixer for mixer in mixers if isinstance(mixer, AttentionSpec)), None)
    if attention is not None:
        dim, heads, kv = attention.memory.head_dim, attention.num_heads, attention.memory.kv_heads
        queries = (2 if attention.has_gate else 1) * heads * dim
        found += [
            ProductShape("qkv", spec.hidden_size, (queries, kv * dim, kv * dim)),
            ProductShape("o", heads * dim, (spec.hidden_size,), follows_attention=True),
        ]
    blocks = [layer.feed_forward for layer in spec.layers]
    dense = next((block for block in blocks if isinstance(block, DenseSpec)), None)
    if dense is not None:
        inner = dense.intermediate_size
        found += [
            ProductShape("gate_up", spec.hidden_size, (inner, inner)),
            ProductShape("down", inner, (spec.hidden_size,)),
        ]
    return [*found, ProductShape("head", spec.hidden_size, (spec.vocab_size,), is_rounded=False)]


class _RowsFormat(WeightFormat):
    """By rows, as a GPU keeps them, also where its kernels run in the interpreter on a CPU."""

    def matrix(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Matrix:
        return torch.empty(rows, columns, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class Products:
    """What products are measured with."""

    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    is_fp8: bool
    num_adapters: int
    adapter_rank: int
    repeats: int

    def measure(
        self, shapes: list[ProductShape], rows: tuple[int, ...]
    ) -> Iterator[dict[str, Any]]:
        """Each product by itself, then a layer's in order."""
        for shape in shapes:
            linears = self.linears(shape, num_copies(self._bytes(shape)))
            for num_rows in rows:
                if shape.name != "head" or num_rows <= MOST_HEAD_ROWS:
                    yield from self._one(shape, linears, num_rows)
            del linears
        layer = [shape for shape in shapes if shape.name != "head"]
        sets = [self.linears(shape, 2) for shape in layer]
        for num_rows in rows:
            yield from self._in_order(layer, sets, num_rows)

    def _bytes(self, shape: ProductShape) -> int:
        is_fp8 = self.is_fp8 and shape.is_rounded
        return shape.num_weights * (1 if is_fp8 else self.dtype.itemsize)

    def linears(self, shape: ProductShape, count: int) -> list[Linear]:
        parts = {f"part{place}": size for place, size in enumerate(shape.parts)}
        found = []
        # As an engine keeps them: a CPU packs, or turns them where it can't; a GPU does neither.
        kept = PackedFormat() if can_pack(self.device, self.dtype) else PLAIN
        if self.kernels.ask_nothing:
            kept = _RowsFormat()
        if self.is_fp8 and shape.is_rounded:
            kept = Fp8Format()
        context = replace(self.context(shape.in_features), format=kept)
        for seed in range(count):
            linear = Linear(shape.in_features, parts, context, bias=False, side=None)
            generator = torch.Generator(self.device).manual_seed(seed)
            for _, fill in linear.weights("weight"):
                draw = torch.empty(fill.whole_shape, dtype=self.dtype, device=self.device)
                fill.take(draw.normal_(std=shape.in_features**-0.5, generator=generator))
            if not self.kernels.ask_nothing:
                linear.weight.pack()
            if self.num_adapters:
                linear.pooled = self._site(shape, generator)
            found.append(linear)
        return found

    def context(self, hidden_size: int, eps: float = 1e-6) -> LayerContext:
        """What layers are made with here."""
        return LayerContext(
            hidden_size=hidden_size, eps=eps, dtype=self.dtype, device=self.device,
            kernels=self.kernels,
        )  # fmt: skip

    def _site(self, shape: ProductShape, generator: torch.Generator) -> LinearSite:
        """Adapters' weights one after the other, all of one rank."""
        rank, num_parts = self.adapter_rank, len(shape.parts)
        total = num_parts * rank
        per_slot = total * shape.in_features + rank * sum(shape.parts)
        pool = torch.empty(self.num_adapters * per_slot, dtype=self.dtype, device=self.device)
        pool.normal_(generator=generator)
        table = []
        for slot in range(self.num_adapters):
            at = slot * per_slot
            pool[at : at + total * shape.in_features] *= shape.in_features**-0.5
            entry, b_at = [at, total], at + total * shape.in_features
            for place, size in enumerate(shape.parts):
                pool[b_at : b_at + size * rank] *= rank**-0.5
                entry += [place * rank, rank, b_at]
                b_at += size * rank
            table.append(entry)
        ones = torch.ones(self.num_adapters, num_parts, device=self.device)
        return LinearSite(
            pool, torch.tensor(table, device=self.device), ones, shape.parts, max_rank=rank
        )

    def step(self, slots: np.ndarray | None) -> Step:
        lora = None if slots is None else LoraRows.build(slots, self.device)
        return Step(ropes=(), memories=(), lora=lora)

    def slots(self, num_rows: int) -> np.ndarray | None:
        """Each row's adapter, drawn evenly; rows of one lie together."""
        if not self.num_adapters:
            return None
        return np.sort(np.random.default_rng(2).integers(0, self.num_adapters, num_rows))

    def x(self, num_rows: int, num_columns: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(7)
        x = torch.randn(num_rows, num_columns, device=self.device, generator=generator)
        return x.to(self.dtype)

    def rows_for(self, shape: ProductShape, linear: Linear, x: Tensor) -> Tensor | Fp8Rows:
        """As the kernel in front leaves them."""
        form = linear.form(len(x))
        if form is None or shape.follows_attention:
            return x
        if self.kernels.ask_nothing:
            from manyroots.kernels import triton_fp8_rows  # a CPU may have no Triton

            return triton_fp8_rows.in_fp8(x, form)
        return in_fp8(x, form)

    def _one(
        self, shape: ProductShape, linears: list[Linear], num_rows: int
    ) -> Iterator[dict[str, Any]]:
        x, slots = self.x(num_rows, shape.in_features), self.slots(num_rows)
        step = self.step(slots)
        given = self.rows_for(shape, linears[0], x)
        case = KernelCase(
            part="products", name=shape.name, rows=str(num_rows), way="ours",
            num_bytes=self._bytes(shape), num_flops=2.0 * shape.num_weights * num_rows,
            tolerance=self._tolerance(shape),
        )  # fmt: skip

        def compare(product: DeferredOutput) -> tuple[Tensor, Tensor]:
            return self._compared(product, linears[0], x, slots)

        make = partial(self._calls, linears, given, step)
        yield measured(case, make, compare, self.repeats, self.device)
        if self.has_library(linears[0]):
            theirs = replace(case, way="library", tolerance="step")
            yield self._library(theirs, [linears], [x])

    def has_library(self, linear: Linear) -> bool:
        """Whether there is one that does the same."""
        return isinstance(linear.weight.data, Tensor) and not self.num_adapters

    def _tolerance(self, shape: ProductShape) -> str:
        if self.is_fp8 and shape.is_rounded:
            return "scaled"
        return "lora" if self.num_adapters else "step"

    @staticmethod
    def _calls(
        linears: list[Linear], given: Tensor | Fp8Rows, step: Step
    ) -> list[Callable[[], DeferredOutput]]:
        return [partial(linear, given, step) for linear in linears]

    def _library(
        self, case: KernelCase, sets: list[list[Linear]], xs: list[Tensor]
    ) -> dict[str, Any]:
        """The same products by torch's own operator, one after the other."""
        weights = [
            [plain(linear.weight.data, self.dtype) for linear in linears] for linears in sets
        ]

        def one(place: int) -> Tensor:
            made = [F.linear(x, copies[place]) for x, copies in zip(xs, weights, strict=True)]
            return made[-1]

        def compare(last: Tensor) -> tuple[Tensor, Tensor]:
            at = self.checked(len(last))
            return last[at], xs[-1][at].float() @ weights[-1][0].float().T

        calls = [partial(one, place) for place in range(len(sets[0]))]
        return measured(case, lambda: calls, compare, self.repeats, self.device)

    def checked(self, count: int) -> Tensor:
        """Rows that are compared."""
        at = torch.linspace(0, count - 1, min(count, MOST_CHECKED)).round().long()
        return at.to(self.device)

    def _compared(
        self, product: DeferredOutput, linear: Linear, x: Tensor, slots: np.ndarray | None
    ) -> tuple[Tensor, Tensor]:
        """Some rows of a product, finished by its set of kernels, and the reference's."""
        reference, at = reference_kernels(), self.checked(len(x))
        form = linear.form(len(x))
        rows: Tensor | Fp8Rows = x[at]
        if form is not None:
            rows = replace(in_fp8(x[at], form), values=None)
        lora = None if slots is None else LoraRows.build(slots[at.cpu().numpy()], self.device)
        sums, _ = reference.gemm.linear(rows, linear.weight.data)
        right = DeferredOutput(sums.to(self.dtype) if lora is None else sums)
        if lora is not None and linear.pooled is not None:
            right = replace(right, lora=reference.lora_ops.shrink(x[at], linear.pooled, lora))
        mine = product.finished(self.kernels)[at]
        return mine.to(self.dtype), right.finished(reference)

    def _in_order(
        self, shapes: list[ProductShape], sets: list[list[Linear]], num_rows: int
    ) -> Iterator[dict[str, Any]]:
        slots = self.slots(num_rows)
        step = self.step(slots)
        xs = [self.x(num_rows, shape.in_features) for shape in shapes]
        given = [
            self.rows_for(shape, linears[0], x)
            for shape, linears, x in zip(shapes, sets, xs, strict=True)
        ]
        case = KernelCase(
            part="products", name=LAYER, rows=str(num_rows), way="ours",
            num_bytes=sum(map(self._bytes, shapes)),
            num_flops=2.0 * sum(shape.num_weights for shape in shapes) * num_rows,
            tolerance=self._tolerance(shapes[-1]),
        )  # fmt: skip

        def one(place: int) -> DeferredOutput:
            made = [linears[place](rows, step) for linears, rows in zip(sets, given, strict=True)]
            return made[-1]

        def compare(last: DeferredOutput) -> tuple[Tensor, Tensor]:
            return self._compared(last, sets[-1][0], xs[-1], slots)

        calls = [partial(one, place) for place in range(len(sets[0]))]
        yield measured(case, lambda: calls, compare, self.repeats, self.device)
        if self.has_library(sets[0][0]):
            theirs = replace(case, way="library", tolerance="step")
            yield self._library(theirs, sets, xs)
