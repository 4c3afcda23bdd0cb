"""A decoder computed with fused kernels: the same weights and the same function as `llama.py`.

Takes tokens and a `FusedStep`; writes keys and values into the arena, gives hidden states and
from those logits. `why_not_fused` says for which models there are no such kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.errors import ConfigError
from manyroots.kernels.choice import Kernels
from manyroots.kernels.fused_step import FusedStep
from manyroots.kernels.limits import MAX_GRID_SIDE, NUM_COUNTERS
from manyroots.kernels.lora_sites.sites import LoraRows
from manyroots.kernels.norm.undivided import UndividedNorm
from manyroots.kernels.rope_write.inputs import QkNorm, RopeTable
from manyroots.layers.fused import (
    SKINNY_INNER,
    FusedAttention,
    FusedExperts,
    FusedMLP,
    FusedProducts,
)
from manyroots.layers.mlp import GatedMLP
from manyroots.layers.moe import SparseMLP
from manyroots.models.llama import FeedForward, Llama, SelfAttention
from manyroots.models.spec import ModelSpec
from manyroots.store.adapter_pool import AdapterPool
from manyroots.store.arena import PageArena

LEAST_HEAD_DIM, MOST_HEAD_DIM = 32, 256


def why_not_fused(spec: ModelSpec) -> str | None:
    """What keeps a model from the fused kernels; None if nothing does."""
    dim = spec.head_dim
    if dim & (dim - 1) or not LEAST_HEAD_DIM <= dim <= MOST_HEAD_DIM:
        return f"its heads have {dim} dimensions"
    if spec.hidden_act != "silu":
        return f"its activation is {spec.hidden_act}"
    experts = spec.traits.experts
    if experts is not None:
        for size in (spec.hidden_size, experts.intermediate_size):
            if size % SKINNY_INNER:
                return f"its experts have a side of {size}, no multiple of {SKINNY_INNER}"
    return None


def check_fused_step(spec: ModelSpec, *, max_num_tokens: int, max_num_rows: int) -> None:
    """Refuse, before anything is loaded, steps that no launch could hold: a grid's second and
    third sides end at 65,535, and rows that attend are counted by key-value head."""
    if max_num_tokens > MAX_GRID_SIDE:
        raise ConfigError(
            f"--max-num-batched-tokens is {max_num_tokens}; on a GPU a step has at most "
            f"{MAX_GRID_SIDE} tokens. Lower it."
        )
    # A row that attends begins query blocks of its own, each cut into up to four programs.
    most_rows = min(NUM_COUNTERS // spec.num_kv_heads, MAX_GRID_SIDE // 8)
    if max_num_rows > most_rows:
        raise ConfigError(
            f"--max-num-seqs is {max_num_rows}; with {spec.num_kv_heads} key-value heads a step "
            f"on a GPU has at most {most_rows} rows. Lower it."
        )


class FusedDecoder:
    """A model's layers, in the order of their kernels."""

    def __init__(
        self,
        model: Llama,
        arena: PageArena,
        kernels: Kernels,
        pool: AdapterPool | None,
        *,
        max_len: int,
    ) -> None:
        """`pool`: None for the base model alone."""
        self.spec = model.spec
        self._model = model
        self._arena = arena
        self._kernels = kernels
        self._pool = pool
        self._products = FusedProducts(kernels, {} if pool is None else pool.sites)
        rope = model.spec.rope
        device = model.embedding.weight.device
        frequencies = torch.tensor(rope.frequencies, dtype=torch.float32, device=device)
        positions = torch.arange(max_len, device=device)
        # Of all positions: half a MiB per thousand, and a decode step looks its rows up.
        self.turns = RopeTable.at(positions, frequencies, rope.attention_scaling)
        self._attentions = [self._attention(layer.attention) for layer in model.layers]
        self._mlps = [self._mlp(layer.mlp) for layer in model.layers]

    def angles(self, positions: Tensor) -> RopeTable:
        """The rotation of a step's tokens."""
        return RopeTable(self.turns.cos[positions], self.turns.sin[positions])

    def hidden(self, tokens: Tensor, step: FusedStep) -> Tensor:
        """Hidden states [num_tokens, hidden_size] after the final norm."""
        eps = self.spec.rms_norm_eps
        residual = F.embedding(tokens, self._model.embedding.weight)
        if step.lora is not None and self._pool is not None:
            site = self._pool.embedding_sites[self._model.embedding.site]
            self._kernels.lora_sites.add_embedding(residual, tokens, site, step.lora)
        layers = self._model.layers
        products = self._products
        x: Tensor | UndividedNorm
        x = self._kernels.norm.rms_norm(residual, layers[0].input_norm.weight, eps)
        for index, layer in enumerate(layers):
            attended = self._attentions[index](x, self._arena.layer(index), step)
            mlp = self._mlps[index]
            x = products.norm_for(mlp.reads, residual, attended, layer.mlp_norm.weight, eps)
            product = mlp(x, step)
            if index + 1 < len(layers):
                reader, weight = (
                    self._attentions[index + 1].reads,
                    layers[index + 1].input_norm.weight,
                )
                x = products.norm_for(reader, residual, product, weight, eps)
        return products.norm_after(residual, product, self._model.norm.weight, eps)

    def logits(self, hidden: Tensor, rows: LoraRows | None = None) -> Tensor:
        """Scores [num_rows, vocab_size] in the model's dtype.

        `rows`: the adapters of these rows.
        """
        sums = self._products.plain(hidden, self._model.lm_head.weight)
        if sums.dim() == 3:
            sums = sums[0] if sums.shape[0] == 1 else sums.sum(0)
        sums = sums.to(hidden.dtype)
        site = None if self._pool is None else self._pool.sites.get(self._model.lm_head.site)
        if rows is not None and site is not None:
            ops = self._kernels.lora_sites
            ops.expand(sums, ops.shrink(hidden, site, rows))
        return sums

    def _attention(self, attention: SelfAttention) -> FusedAttention:
        norm = None
        if attention.qk_norms is not None:
            q_norm, k_norm = attention.qk_norms
            norm = QkNorm(q_norm.weight, k_norm.weight, self.spec.rms_norm_eps)
        return FusedAttention(self._kernels, self._products, attention.qkv, attention.o, norm)

    def _mlp(self, mlp: FeedForward) -> FusedMLP | FusedExperts:
        if isinstance(mlp, GatedMLP):
            return FusedMLP(self._kernels, self._products, mlp)
        if isinstance(mlp, SparseMLP):
            sites = {} if self._pool is None else self._pool.expert_sites
            return FusedExperts(self._kernels, self._products, mlp, sites)
        raise TypeError(f"no fused kernels for {type(mlp).__name__}")
