"""A decoder layer as a handful of fused kernels: the path of CUDA.

Takes the weights of the layers that `models` built and computes the same function; see
`kernels/README.md` for the order of the launches. What one kernel leaves undone (partial sums of
a product, an adapter's expand, the sum over a token's experts) the next one finishes, so the
pieces here hand on a `Product` rather than a plain tensor.

Nothing here waits for the device or asks it anything: a step can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.activation.kinds import Activation
from manyroots.kernels.choice import Kernels
from manyroots.kernels.fused_step import FusedStep
from manyroots.kernels.lora_sites.sites import LinearSite, LoraRows, LoraTerm
from manyroots.kernels.moe_pairs.adapters import ExpertAdapters, ExpertSite
from manyroots.kernels.moe_pairs.routing import Scoring
from manyroots.kernels.moe_pairs.weights import ExpertWeights
from manyroots.kernels.norm.undivided import UndividedNorm
from manyroots.kernels.rope_write.inputs import QkNorm
from manyroots.layers.linear import Linear
from manyroots.layers.mlp import GatedMLP
from manyroots.layers.moe import SparseMLP
from manyroots.store.adapter_sites import LoraSite

MAX_SKINNY_ROWS = 64
"""Up to here a product is bound by reading its weight, and the skinny kernel reads it faster than
the library does; beyond, it is the library's."""
SKINNY_INNER = 128
"""The skinny kernel reads the inner dimension in whole pieces of this size."""

Sites = Mapping[LoraSite, LinearSite]
"""Where the adapters' weights for each product lie on the device."""
ExpertSites = Mapping[LoraSite, ExpertSite]
"""The same for products of experts."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product that its reader finishes."""

    sums: Tensor
    """[num_tokens, n], or partial sums [splits, num_tokens, n]."""
    lora: LoraTerm | None


class FusedProducts:
    """Products with weights, and with adapters' beside them."""

    def __init__(self, kernels: Kernels, sites: Sites) -> None:
        self._kernels = kernels
        self._sites = sites

    def __call__(self, x: Tensor | UndividedNorm, linear: Linear, rows: LoraRows | None) -> Product:
        """x [num_tokens, in] through `linear`."""
        site = None if rows is None else self._sites.get(linear.site)
        if isinstance(x, UndividedNorm) or _is_skinny_product(x, linear):
            return Product(*self._kernels.gemm.linear(x, linear.weight, site, rows))
        sums = F.linear(x, linear.weight, linear.bias)
        if site is None or rows is None:
            return Product(sums, None)
        return Product(sums, self._kernels.lora_sites.shrink(x, site, rows))

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        """x times a weight that no adapter changes, perhaps in partial sums."""
        if is_skinny(x):
            sums: Tensor = self._kernels.gemm.linear(x, weight)[0]
            return sums
        return F.linear(x, weight)

    def norm_for(
        self, reader: Linear | None, residual: Tensor, product: Product, weight: Tensor, eps: float
    ) -> Tensor | UndividedNorm:
        """The same for `reader`, if nobody else reads it: what adapters add is then spread over
        many programs, and the reader divides."""
        if product.lora is None or reader is None or not _is_skinny_product(residual, reader):
            return self.norm_after(residual, product, weight, eps)
        if residual.dtype == torch.float16:  # rows that are not divided yet might be out of range
            return self.norm_after(residual, product, weight, eps)
        normed: UndividedNorm = self._kernels.norm.add_norm(
            residual, product.sums, weight, eps, product.lora
        )
        return normed

    def norm_after(self, residual: Tensor, product: Product, weight: Tensor, eps: float) -> Tensor:
        """Add a product onto the residual in place; give the sum, normalised."""
        product = self.expanded_for_many(product)
        normed: Tensor = self._kernels.norm.add_rms_norm(
            residual, product.sums, weight, eps, product.lora
        )
        return normed

    def expanded_for_many(self, product: Product) -> Product:
        """The product with its adapters' part, if it has many rows: a reader with one program per
        row would read the adapter once per row."""
        sums, term = product.sums, product.lora
        if term is None or sums.shape[-2] <= MAX_SKINNY_ROWS:
            return product
        whole = sums if sums.dim() == 2 else sums.sum(0).to(term.site.pool.dtype)
        self._kernels.lora_sites.expand(whole, term)
        return Product(whole, None)


def _is_skinny_product(x: Tensor, linear: Linear) -> bool:
    """Whether the skinny kernel computes the product of rows like x with `linear`."""
    return linear.bias is None and is_skinny(x)


def is_skinny(x: Tensor) -> bool:
    return x.shape[0] <= MAX_SKINNY_ROWS and x.shape[1] % SKINNY_INNER == 0


class FusedAttention:
    """qkv, its norms and rotation, attention over pages, and o."""

    def __init__(
        self, kernels: Kernels, products: FusedProducts, qkv: Linear, o: Linear, norm: QkNorm | None
    ) -> None:
        self._kernels = kernels
        self._products = products
        self._qkv, self._o, self._norm = qkv, o, norm

    @property
    def reads(self) -> Linear | None:
        """The one product that its input is for."""
        return self._qkv

    def __call__(self, x: Tensor | UndividedNorm, layer_kv: Tensor, step: FusedStep) -> Product:
        qkv = self._products(x, self._qkv, step.lora)
        q = self._kernels.rope_write.rope_write(
            qkv.sums, step.angles, self._norm, layer_kv, step.slots, qkv.lora
        )
        return self._products(self._attend(q, layer_kv, step).flatten(1), self._o, step.lora)

    def _attend(self, q: Tensor, layer_kv: Tensor, step: FusedStep) -> Tensor:
        attention, scale = self._kernels.attention, q.shape[-1] ** -0.5
        out: Tensor
        if step.prefills is None:
            out = attention.decode_attention(q, layer_kv, step.decodes, scale)
        elif step.decodes is None:
            out = attention.prefill_attention(q, layer_kv, step.prefills, scale)
        else:
            count = step.num_decodes
            decoded = attention.decode_attention(q[:count], layer_kv, step.decodes, scale)
            rest = attention.prefill_attention(q[count:], layer_kv, step.prefills, scale)
            out = decoded.new_empty(q.shape)
            out[:count], out[count:] = decoded, rest
        return out


class FusedMLP:
    """A `GatedMLP` with silu."""

    def __init__(self, kernels: Kernels, products: FusedProducts, mlp: GatedMLP) -> None:
        self._kernels, self._products, self._mlp = kernels, products, mlp

    @property
    def reads(self) -> Linear | None:
        """The one product that its input is for."""
        return self._mlp.gate_up

    def __call__(self, x: Tensor | UndividedNorm, step: FusedStep) -> Product:
        weight = self._mlp.gate_up.weight
        gate_up = self._products(x, self._mlp.gate_up, step.lora)
        hidden = self._kernels.activation.gated(gate_up.sums, Activation.SILU, weight, gate_up.lora)
        return self._products(hidden, self._mlp.down, step.lora)


class FusedExperts:
    """A `SparseMLP` with silu. The sum over a token's experts is left to the next norm."""

    def __init__(
        self, kernels: Kernels, products: FusedProducts, mlp: SparseMLP, sites: ExpertSites
    ) -> None:
        self._kernels, self._products, self._mlp = kernels, products, mlp
        experts = mlp.experts
        self._gate_up, self._down = sites.get(experts.gate_up_site), sites.get(experts.down_site)

    @property
    def reads(self) -> Linear | None:
        """None: the router reads its input, too."""
        return None

    def __call__(self, x: Tensor | UndividedNorm, step: FusedStep) -> Product:
        if isinstance(x, UndividedNorm):
            raise TypeError("experts read rows that are whole")
        moe, spec = self._kernels.moe_pairs, self._mlp.router.spec
        scores = self._products.expanded_for_many(
            self._products(x, self._mlp.router.scores, step.lora)
        )
        is_whole = spec.norm_topk_prob
        scoring = Scoring.SOFTMAX_RENORMALISED if is_whole else Scoring.SOFTMAX
        routing = moe.route(scores.sums, spec.experts_per_token, scores.lora, scoring=scoring)
        weights = ExpertWeights(self._mlp.experts.gate_up, self._mlp.experts.down)
        return Product(moe.experts(x, routing, weights, self._adapters(step.lora)), None)

    def _adapters(self, rows: LoraRows | None) -> ExpertAdapters | None:
        if rows is None or self._gate_up is None or self._down is None:
            return None
        return ExpertAdapters(self._gate_up, self._down, rows)
