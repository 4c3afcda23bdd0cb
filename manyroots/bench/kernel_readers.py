"""The kernels that finish a product: the norm after down, the activation after gate_up.

Takes what `kernel_products.py` measures with; gives rows of a report. They add up partial sums, and
expand what adapters add; what they read is cold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manyroots.bench.kernel_products import Products, ProductShape
from manyroots.bench.kernel_times import Calls, KernelCase, measured, num_copies
from manyroots.kernels.choice import reference_kernels
from manyroots.kernels.fp8_rows import values_of
from manyroots.kernels.norm.deferred import DeferredRMSNorm
from manyroots.layers.deferred_output import DeferredOutput
from manyroots.layers.linear import Linear
from manyroots.layers.norm import RMSNorm
from manyroots.layers.spec import DenseSpec
from manyroots.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Readers:
    """Of a model with dense feed-forward blocks."""

    products: Products
    spec: ModelSpec
    dense: DenseSpec

    @classmethod
    def of(cls, products: Products, spec: ModelSpec) -> Readers | None:
        """None: the model has no such block."""
        blocks = [layer.feed_forward for layer in spec.layers]
        dense = [block for block in blocks if isinstance(block, DenseSpec) and not block.is_fused]
        return cls(products, spec, dense[0]) if dense else None

    def measure(
        self, shapes: list[ProductShape], rows: tuple[int, ...]
    ) -> Iterator[dict[str, Any]]:
        by_name = {shape.name: shape for shape in shapes}
        gate_up, down = (self.products.linears(by_name[name], 1)[0] for name in ("gate_up", "down"))
        for num_rows in rows:
            yield self._activation(by_name["gate_up"], gate_up, num_rows)
        for num_rows in rows:
            yield self._norm(by_name["down"], down, gate_up, num_rows)

    def _product(self, shape: ProductShape, linear: Linear, num_rows: int) -> DeferredOutput:
        x, slots = self.products.x(num_rows, shape.in_features), self.products.slots(num_rows)
        return linear(x, self.products.step(slots))

    def _finished(self, product: DeferredOutput) -> Tensor:
        """Of a copy: adapters are added in place."""
        return replace(product, sums=product.sums.clone()).finished(self.products.kernels)

    def _activation(self, shape: ProductShape, linear: Linear, num_rows: int) -> dict[str, Any]:
        kernels, dtype = self.products.kernels, self.products.dtype
        product = self._product(shape, linear, num_rows)

        def one(given: DeferredOutput) -> Tensor:
            return values_of(
                kernels.activation.gated(given.sums, self.dense.activation, dtype, given.lora)
            )

        right = values_of(
            reference_kernels().activation.gated(
                self._finished(product), self.dense.activation, dtype
            )
        )
        calls = [partial(one, given) for given in _copies(product)]
        return self._measured("gated", num_rows, product, right, calls, shape.parts[0])

    def _norm(
        self, shape: ProductShape, linear: Linear, reader: Linear, num_rows: int
    ) -> dict[str, Any]:
        products, size = self.products, self.spec.hidden_size
        norm = RMSNorm(size, products.context(size, self.spec.rms_norm_eps))
        norm.weight.fill_(1.0)
        product, residual = self._product(shape, linear, num_rows), products.x(num_rows, size)
        right = values_of(
            reference_kernels().norm.add_rms_norm(
                residual.clone(), self._finished(product), norm.weight, norm.eps
            )
        )
        calls = [partial(norm.after, residual.clone(), given, reader) for given in _copies(product)]
        # The residual stream is read and written, too.
        return self._measured("norm", num_rows, product, right, calls, 3 * size)

    def _measured(
        self,
        name: str,
        num_rows: int,
        product: DeferredOutput,
        right: Tensor,
        calls: Calls,
        num_columns: int,
    ) -> dict[str, Any]:
        """`num_columns`: that are read and written beside the product."""
        has_adapters = self.products.num_adapters > 0
        case = KernelCase(
            part="readers", name=name, rows=str(num_rows), way="ours", num_flops=0.0,
            num_bytes=_num_bytes(product.sums) + num_rows * num_columns * right.element_size(),
            tolerance="lora" if has_adapters else "norm",
        )  # fmt: skip

        def compare(out: Any) -> tuple[Tensor, Tensor]:
            if isinstance(out, DeferredRMSNorm):  # the product that reads it would divide
                out = (out.values.float() * out.factors).to(right.dtype)
            return out, right

        return measured(case, lambda: calls, compare, self.products.repeats, self.products.device)


def _copies(product: DeferredOutput) -> list[DeferredOutput]:
    """The same, elsewhere in memory, often enough that each is cold."""
    count = num_copies(_num_bytes(product.sums))
    return [product, *(replace(product, sums=product.sums.clone()) for _ in range(count - 1))]


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
