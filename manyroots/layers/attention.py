"""The attention of one layer over paged keys and values, without its projections.

Takes this step's queries, keys and values; writes the keys and values of *all* tokens into their
pages, then attends. The order matters: a step may let one sequence read a page that another
sequence fills in the same step. Knows nothing of weights or positions.

The kernel is chosen here and nowhere else; see `kernels/README.md`.
"""

from __future__ import annotations

from torch import Tensor

from manyroots.kernels.attention import torch_ops
from manyroots.kernels.attention.batch import AttentionBatch


class Attention:
    """softmax(q k^T * scale) v, causal, over the pages of each sequence."""

    def __init__(self, head_dim: int) -> None:
        self._scale = head_dim**-0.5

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, batch: AttentionBatch
    ) -> Tensor:
        """All of q, k, v are [num_tokens, their heads, head_dim]; gives the shape of q."""
        torch_ops.write_kv(layer_kv, k, v, batch)
        return torch_ops.paged_attention(q, layer_kv, batch, self._scale)
