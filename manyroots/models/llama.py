"""The Llama decoder, which Mistral, Qwen2 and Qwen3 are variations of.

Takes tokens, their positions, the step's `AttentionBatch` and its adapters; writes keys and values
into the arena and gives hidden states, and from those logits. What differs between the variations
is in `Traits`: where there are biases, and whether queries and keys are normalised.

    x -> norm -> qkv -> rotary -> attention over pages -> o -> + x
      -> norm -> gate, up -> act(gate) * up -> down        -> + x
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from manyroots.distributed.shard import WHOLE, Shard
from manyroots.kernels.attention.batch import AttentionBatch
from manyroots.kernels.lora.batch import AdapterBatch
from manyroots.layers.attention import Attention
from manyroots.layers.embedding import Embedding, LmHead
from manyroots.layers.linear import FusedLinear, Linear
from manyroots.layers.mlp import GatedMLP
from manyroots.layers.norm import RMSNorm
from manyroots.layers.rotary import Rotary, Rotation
from manyroots.lora.targets import Target
from manyroots.models.spec import ModelSpec, Traits
from manyroots.store.adapter_sites import SitePart
from manyroots.store.arena import PageArena


class SelfAttention:
    """Projections around the paged attention of one layer."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        traits = spec.traits
        self._head_counts = [heads, kv_heads, kv_heads]
        self._head_dim = dim
        parts = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        self.qkv = FusedLinear(
            spec.hidden_size, parts, bias=traits.qkv_bias, dtype=dtype, device=device
        )
        self.o = Linear(
            heads * dim, spec.hidden_size, bias=traits.o_bias, dtype=dtype, device=device
        )
        self.qk_norms = (
            (
                RMSNorm(dim, eps=spec.rms_norm_eps, dtype=dtype, device=device),
                RMSNorm(dim, eps=spec.rms_norm_eps, dtype=dtype, device=device),
            )
            if traits.qk_norm
            else None
        )
        self.attention = Attention(dim)

    def __call__(
        self,
        x: Tensor,
        rotation: Rotation,
        layer_kv: Tensor,
        batch: AttentionBatch,
        adapters: AdapterBatch | None,
    ) -> Tensor:
        heads = self.qkv(x, adapters).view(x.shape[0], -1, self._head_dim)
        q, k, v = torch.split(heads, self._head_counts, dim=1)
        if self.qk_norms is not None:
            q_norm, k_norm = self.qk_norms
            q, k = q_norm(q), k_norm(k)
        attended = self.attention(rotation(q), rotation(k), v, layer_kv, batch)
        return self.o(attended.flatten(1), adapters)

    def weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.qkv.weights(name)
        yield from self.o.weights(f"{name}.o_proj")
        if self.qk_norms is not None:
            q_norm, k_norm = self.qk_norms
            yield from q_norm.weights(f"{name}.q_norm")
            yield from k_norm.weights(f"{name}.k_norm")

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        yield from self.qkv.lora_parts(name)
        yield from self.o.lora_parts(f"{name}.o_proj")


class FeedForward(Protocol):
    """What a decoder layer asks of its feed-forward block."""

    def __call__(self, x: Tensor, adapters: AdapterBatch | None) -> Tensor: ...

    def weights(self, name: str) -> Iterator[tuple[str, Tensor]]: ...

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]: ...


class DecoderLayer:
    """Attention and feed-forward, each added onto the residual stream."""

    def __init__(
        self,
        spec: ModelSpec,
        mlp: FeedForward,
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
    ) -> None:
        self._shard = shard
        hidden, eps = spec.hidden_size, spec.rms_norm_eps
        self.input_norm = RMSNorm(hidden, eps=eps, dtype=dtype, device=device)
        self.attention = SelfAttention(spec, dtype=dtype, device=device)
        self.mlp_norm = RMSNorm(hidden, eps=eps, dtype=dtype, device=device)
        self.mlp = mlp

    def __call__(
        self,
        x: Tensor,
        rotation: Rotation,
        layer_kv: Tensor,
        batch: AttentionBatch,
        adapters: AdapterBatch | None,
    ) -> Tensor:
        """Adds onto `x` in place; the caller has no other use for it."""
        add_up = self._shard.add_up
        x.add_(add_up(self.attention(self.input_norm(x), rotation, layer_kv, batch, adapters)))
        return x.add_(add_up(self.mlp(self.mlp_norm(x), adapters)))

    def weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.input_norm.weights(f"{name}.input_layernorm")
        yield from self.attention.weights(f"{name}.self_attn")
        yield from self.mlp_norm.weights(f"{name}.post_attention_layernorm")
        yield from self.mlp.weights(f"{name}.mlp")

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        yield from self.attention.lora_parts(f"{name}.self_attn")
        yield from self.mlp.lora_parts(f"{name}.mlp")


class Llama:
    """Llama 2 and 3, SmolLM2, and the base of the other decoders."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = WHOLE,
    ) -> None:
        """`spec` is the rank's own: see `models/sharding.py`."""
        self.spec = spec
        self.shard = shard
        vocab, hidden = spec.vocab_size, spec.hidden_size
        self.embedding = Embedding(vocab, hidden, dtype=dtype, device=device)
        self.rotary = Rotary(spec.rope, dtype=dtype, device=device)
        self.layers = [
            DecoderLayer(
                spec,
                self.make_mlp(index, dtype=dtype, device=device),
                dtype=dtype,
                device=device,
                shard=shard,
            )
            for index in range(spec.num_layers)
        ]
        self.norm = RMSNorm(hidden, eps=spec.rms_norm_eps, dtype=dtype, device=device)
        tied_to = self.embedding if spec.tie_word_embeddings else None
        rows = shard.part(vocab)
        self.lm_head = LmHead(rows, hidden, tied_to=tied_to, dtype=dtype, device=device)

    @staticmethod
    def traits(config: Any) -> Traits:
        """What this architecture's config means."""
        return Traits(
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
            qk_norm=False,
        )

    def make_mlp(
        self, layer_index: int, *, dtype: torch.dtype, device: torch.device
    ) -> FeedForward:
        """The feed-forward block of a layer; the same in all of them here."""
        spec = self.spec
        return GatedMLP(
            spec.hidden_size,
            spec.intermediate_size,
            activation=spec.hidden_act,
            bias=spec.traits.mlp_bias,
            dtype=dtype,
            device=device,
        )

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        arena: PageArena,
        adapters: AdapterBatch | None,
    ) -> Tensor:
        """Hidden states [num_tokens, hidden_size] after the final norm."""
        x = self.embedding(tokens, adapters)
        rotation = self.rotary.at(positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, arena.layer(index), batch, adapters)
        return self.norm(x)

    @torch.no_grad()
    def logits(self, hidden: Tensor, adapters: AdapterBatch | None) -> Tensor:
        """Scores [num_rows, vocab_size] in float32 for the rows that need them.

        `adapters` are those of these rows, not of all tokens of the step.
        """
        return self.shard.join(self.lm_head(hidden, adapters), self.spec.vocab_size)

    def weights(self) -> dict[str, Tensor]:
        """A checkpoint's tensor names, and the memory each is copied into."""
        return dict(self._weights())

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.embedding.weights("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"model.layers.{index}")
        yield from self.norm.weights("model.norm")
        yield from self.lm_head.weights("lm_head")

    def lora_parts(self) -> dict[str, SitePart]:
        """What adapters may change, by name, and in which product it is computed."""
        return dict(self._lora_parts())

    def adapter_targets(self) -> dict[str, Target]:
        """What adapters may change, for whoever checks their files."""
        return {name: part.target for name, part in self._lora_parts()}

    def _lora_parts(self) -> Iterator[tuple[str, SitePart]]:
        yield from self.embedding.lora_parts("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            yield from layer.lora_parts(f"model.layers.{index}")
        yield from self.lm_head.lora_parts("lm_head")
