"""Adapters at a layer: the one choice of kernel, and the rule when there is nothing to do.

`adapters` is the step's, and None in a step without any: then a layer computes exactly what it
would if adapters did not exist. Adds in place, onto the base model's product.
"""

from __future__ import annotations

from torch import Tensor

from manyroots.kernels.expert_lora import torch_ops as expert_ops
from manyroots.kernels.expert_lora.pairs import AdapterPairs
from manyroots.kernels.lora import torch_ops
from manyroots.kernels.lora.batch import AdapterBatch
from manyroots.kernels.moe import torch_ops as moe_ops
from manyroots.kernels.moe.routing import SortedRouting
from manyroots.store.adapter_sites import LoraSite


def add_linear(y: Tensor, x: Tensor, site: LoraSite, adapters: AdapterBatch | None) -> Tensor:
    """y + B A x, for the tokens that have adapters; gives y."""
    if adapters is not None:
        torch_ops.add_linear(y, x, site, adapters)
    return y


def add_embedding(
    y: Tensor, tokens: Tensor, site: LoraSite, adapters: AdapterBatch | None
) -> Tensor:
    """y + B A[token], for the tokens that have adapters; gives y."""
    if adapters is not None:
        torch_ops.add_embedding(y, tokens, site, adapters)
    return y


def add_to_pairs(y: Tensor, x: Tensor, site: LoraSite, pairs: AdapterPairs | None) -> Tensor:
    """y + B A x for the pairs of experts that have adapters; x is of tokens. Gives y."""
    if pairs is not None:
        expert_ops.add_to_pairs(y, x, site, pairs)
    return y


def combine_pairs(
    y: Tensor, x: Tensor, site: LoraSite, routing: SortedRouting, pairs: AdapterPairs | None
) -> Tensor:
    """The weighted sum of y + B A x over each token's pairs; y is used up."""
    if pairs is None:
        return moe_ops.combine(y, routing)
    return expert_ops.combine(y, x, site, pairs)
