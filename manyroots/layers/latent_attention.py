"""Latent attention (MLA), with its projections.

    c, r = kv_a_proj_with_mqa(x)               one latent and one rotated part per token: the memory
    q    = q_b_proj(norm(q_a_proj(x)))         or q_proj(x)
    k, v = kv_b_proj(norm(c)), with r in every head's key
    o_proj(attend(q, k, v))

Decoding tokens never expand keys. Instead, their queries and attention outputs are multiplied with
`kv_b_proj`. Prompts expand keys and values in pieces, unless few queries make latents cheaper.
Latents of all tokens of the step are written before any token attends.

Adapters of `kv_b_proj` are added in factored form wherever it is multiplied. Keys of earlier tokens
therefore get the adapter of the request that reads them. It is the same adapter that wrote them,
because pages belong to one adapter version. An adapter that starts within a sequence may not change
`kv_b_proj`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from manyroots.kernels.latent.inputs import LatentAdapters, LatentNorm
from manyroots.kernels.latent.step import ExpandedPiece, LatentStep
from manyroots.kernels.lora_ops.sites import LoraRows
from manyroots.kernels.norm.deferred import NormedRows
from manyroots.layers.context import LayerContext
from manyroots.layers.deferred_output import DeferredOutput
from manyroots.layers.linear import Linear
from manyroots.layers.spec import LatentSpec
from manyroots.layers.step import Step
from manyroots.layers.weights.fill import Fill, Fills
from manyroots.lora.targets import Side
from manyroots.store.adapter_sites import SitePart

Q_A, KV_A = "q_a_proj", "kv_a_proj_with_mqa"


class LatentAttention:
    """The two first products, their norms, attention to latents or to expanded keys, and o."""

    def __init__(self, spec: LatentSpec, family: int, context: LayerContext) -> None:
        """`spec` is the rank's own; `family`: the index of its memory in the step."""
        self._spec, self._family = spec, family
        self._kernels, self._dtype = context.kernels, context.dtype
        memory, heads = spec.memory, spec.num_heads
        width, hidden = memory.latent + memory.rope, context.hidden_size
        first = {KV_A: width} if spec.q_rank is None else {Q_A: spec.q_rank, KV_A: width}
        self.first = Linear(hidden, first, context, bias=spec.bias, side=None)
        query = {"": heads * (spec.nope + memory.rope)}
        self.q = Linear(spec.q_rank or hidden, query, context, bias=False, side=Side.OUTPUT)
        both = {"": heads * (spec.nope + spec.value_dim)}
        self.kv_b = Linear(memory.latent, both, context, bias=False, side=Side.OUTPUT)
        self.kv_b.weight.keep_numbers()
        self.kv_b.site.is_recomputed = True
        self.o = Linear(
            heads * spec.value_dim, {"": hidden}, context, bias=spec.bias, side=Side.INPUT
        )
        self._q_norm = None if spec.q_rank is None else context.empty(spec.q_rank)
        self._norm = LatentNorm(context.empty(memory.latent), spec.norm_eps)

    @property
    def reader(self) -> Linear | None:
        """The only product that reads its input."""
        return None if self._q_norm is None else self.first

    def __call__(self, x: NormedRows, pages: Tensor, step: Step) -> DeferredOutput:
        q, kv = self._projected(x, step)
        latents: LatentStep = step.memories[self._family]
        q = self._kernels.latent.latent_write(
            q, kv, step.ropes[self._spec.rope], self._norm, pages, latents.slot_mapping,
            is_interleaved=self._spec.is_interleaved,
        )  # fmt: skip
        return self.o(self._attended(q, pages, latents, step).flatten(1), step)

    def _projected(self, x: NormedRows, step: Step) -> tuple[Tensor, Tensor]:
        """Queries [tokens, heads, nope + rope], and latents with their unrotated part."""
        both = self.first(x, step).finished(self._kernels).to(self._dtype)
        if self._q_norm is None:
            q, kv = self.q(x, step), both
        else:
            rank = len(self._q_norm)
            latent_q, kv = both[:, :rank], both[:, rank:]
            normed = self._kernels.norm.rms_norm(
                latent_q.contiguous(), self._q_norm, self._spec.norm_eps
            )
            q = self.q(normed, step)
        queries = q.finished(self._kernels).to(self._dtype)
        return queries.view(len(queries), self._spec.num_heads, -1), kv

    def _attended(self, q: Tensor, pages: Tensor, latents: LatentStep, step: Step) -> Tensor:
        """[tokens, heads, value_dim]"""
        prompts, count = latents.prompts, latents.num_decodes
        if prompts is None or self._spec.prefers_latents(
            len(q) - count, int(prompts.context_lens.sum()), prompts.num_seen
        ):
            return self._to_latents(q, pages, *latents.every_row, self._adapters(step.lora))
        expanded = self._to_keys(q[count:], pages, latents, step)
        if not count:
            return expanded
        adapters = self._adapters(latents.lora_of_decodes(step.lora))
        return torch.cat((self._to_latents(q[:count], pages, *latents.decodes, adapters), expanded))

    def _to_latents(
        self,
        q: Tensor,
        pages: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        adapters: LatentAdapters | None,
    ) -> Tensor:
        """A row for each token, with `kv_b_proj` absorbed."""
        spec, kernels, weight = self._spec, self._kernels.latent, self._by_head
        queries = kernels.absorb_queries(q, weight, spec.nope, adapters)
        attended = kernels.latent_decode(
            queries, pages, page_table, lengths, spec.scale, spec.memory.latent
        )
        return kernels.expand_values(attended, weight, spec.nope, adapters)

    def _to_keys(self, q: Tensor, pages: Tensor, latents: LatentStep, step: Step) -> Tensor:
        """Attend from prompts to keys and values that are expanded piece by piece."""
        kernels, spec = self._kernels.latent, self._spec
        is_whole = len(latents.pieces) == 1
        out = q.new_zeros(*q.shape[:2], spec.value_dim, dtype=torch.float32)
        sums = torch.full(q.shape[:2], -torch.inf, device=q.device)
        for place, piece in enumerate(latents.pieces):
            k, v = self._expanded(piece, pages, latents.lora_of_keys(step.lora, place))
            found, own = kernels.attend_piece(q[piece.tokens], k, v, piece.piece, spec.scale)
            if is_whole:
                return found
            at = piece.tokens
            out[at], sums[at] = kernels.merge(out[at], sums[at], found, own)
        return out.to(q.dtype)

    def _expanded(
        self, piece: ExpandedPiece, pages: Tensor, lora: LoraRows | None
    ) -> tuple[Tensor, Tensor]:
        """Keys [keys, heads, nope + rope] and values [keys, heads, value_dim]."""
        spec, memory = self._spec, self._spec.memory
        rows = self._kernels.latent.latent_read(
            pages, piece.slots, memory.latent, memory.rope, self._dtype
        )
        latents, rotated = rows[:, : memory.latent], rows[:, memory.latent :]
        both = self.kv_b.of(latents.contiguous(), lora).finished(self._kernels).to(self._dtype)
        both = both.view(len(both), spec.num_heads, -1)
        shared = rotated[:, None].expand(-1, spec.num_heads, -1)
        return torch.cat((both[..., : spec.nope], shared), dim=2), both[..., spec.nope :]

    @property
    def _by_head(self) -> Tensor:
        """`kv_b_proj` as [heads, nope + value_dim, latent]."""
        numbers = self.kv_b.weight.numbers
        assert numbers is not None, "weights are packed when they are loaded"
        return numbers.view(self._spec.num_heads, -1, self._spec.memory.latent)

    def _adapters(self, lora: LoraRows | None) -> LatentAdapters | None:
        if lora is None or self.kv_b.pooled is None:
            return None
        return LatentAdapters(self.kv_b.pooled, lora)

    def weights(self, name: str) -> Fills:
        yield from self.first.weights(name)
        for linear, own in self._named():
            yield from linear.weights(f"{name}.{own}")
        if self._q_norm is not None:
            yield f"{name}.q_a_layernorm.weight", Fill(self._q_norm)
        yield f"{name}.kv_a_layernorm.weight", Fill(self._norm.weight)

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        yield from self.first.lora_parts(name)
        for linear, own in self._named():
            yield from linear.lora_parts(f"{name}.{own}")

    def products(self) -> Iterator[Linear]:
        yield self.first
        for linear, _ in self._named():
            yield linear

    def _named(self) -> Iterator[tuple[Linear, str]]:
        """All products but the first, with their names in the checkpoint."""
        yield self.q, "q_proj" if self._q_norm is None else "q_b_proj"
        yield self.kv_b, "kv_b_proj"
        yield self.o, "o_proj"
