"""Latent attention (MLA), with its projections.

    c, r = kv_a_proj_with_mqa(x)               one latent and one rotated part per token: the memory
    q    = q_b_proj(norm(q_a_proj(x)))         or q_proj(x)
    k, v = kv_b_proj(norm(c)), with r in every head's key
    o_proj(attend(q, k, v))

The products that read x are one.

Decoding tokens never expand keys. Instead, their queries and attention outputs are multiplied with
`kv_b_proj`. Prompts expand keys and values in pieces, unless few queries make latents cheaper.
Latents of all tokens of the step are written before any token attends.

Adapters of `kv_b_proj` are added in factored form wherever it is multiplied. Keys of earlier tokens
therefore get the adapter of the request that reads them. It is the same adapter that wrote them,
because pages belong to one adapter version. An adapter that starts within a sequence may not change
`kv_b_proj`.

With an index, queries see the tokens that they chose. Its own heads compare queries, products of
the queries' latent, with one key per token; the greatest sums of positive scores are chosen. A
layer without its own index reads the choice of the one before. Until some query sees more tokens
than it may choose, attention is computed as without an index.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from manyroots.kernels.compressed.step import ChosenStep, RowsStep
from manyroots.kernels.latent.inputs import IndexNorm, LatentAdapters, LatentNorm, SplitKeys
from manyroots.kernels.latent.step import ExpandedPiece, LatentStep
from manyroots.kernels.lora_ops.sites import LoraRows
from manyroots.kernels.norm.deferred import NormedRows, whole_rows
from manyroots.layers.context import LayerContext
from manyroots.layers.deferred_output import DeferredOutput
from manyroots.layers.linear import Linear
from manyroots.layers.spec import LatentSpec, TokenIndexSpec
from manyroots.layers.step import Step
from manyroots.layers.weights.fill import Fill, Fills
from manyroots.lora.targets import OutputPiece, Side
from manyroots.store.adapter_sites import SitePart

Q, Q_A, KV_A = "q_proj", "q_a_proj", "kv_a_proj_with_mqa"


class _Index:
    """Of one layer: which tokens each query sees."""

    def __init__(self, spec: TokenIndexSpec, q_rank: int, context: LayerContext) -> None:
        self._spec, self._kernels, self._dtype = spec, context.kernels, context.dtype
        hidden, dim = context.hidden_size, spec.head_dim
        # Every rank has all of it, so that all choose the same.
        self.q = Linear(q_rank, {"": spec.num_heads * dim}, context, bias=False, side=None)
        self.k = Linear(hidden, {"": dim}, context, bias=False, side=None)
        # Checkpoints whose other products are quantized have this one in plain numbers.
        self.shares = Linear(
            hidden, {"": spec.num_heads}, context.unquantized, bias=False, side=None
        )
        self._norm = IndexNorm(context.empty(dim), context.empty(dim), spec.norm_eps)

    def __call__(
        self, x: Tensor, latent_q: Tensor, keys: Tensor, rows: RowsStep, step: Step, angles: object
    ) -> Tensor | None:
        """Write the step's keys; give what queries chose, by position; None: all."""
        spec, kernels = self._spec, self._kernels
        q = self.q(latent_q, step).finished(kernels).to(self._dtype)
        k = self.k(x, step).finished(kernels).to(self._dtype)
        q = kernels.latent.index_write(
            q.view(len(q), spec.num_heads, -1), k, angles, self._norm, keys, rows.slot_mapping,
            is_interleaved=spec.is_interleaved,
        )  # fmt: skip
        if not rows.may_exceed(spec.num_chosen):
            return None
        shares = self.shares(x, step).finished(kernels).float()
        shares = shares * (spec.num_heads * spec.head_dim) ** -0.5
        return kernels.compressed.choose_entries(q, shares, keys, rows, spec.num_chosen)

    def weights(self, name: str) -> Fills:
        for linear, own in self.named():
            yield from linear.weights(f"{name}.{own}")
        yield f"{name}.indexer.k_norm.weight", Fill(self._norm.weight)
        yield f"{name}.indexer.k_norm.bias", Fill(self._norm.bias)

    def named(self) -> Iterator[tuple[Linear, str]]:
        """Its products, with their names in the checkpoint."""
        yield self.q, "indexer.wq_b"
        yield self.k, "indexer.wk"
        yield self.shares, "indexer.weights_proj"


class LatentAttention:
    """The two first products, their norms, attention to latents or to expanded keys, and o."""

    def __init__(self, spec: LatentSpec, family: int, context: LayerContext) -> None:
        """`spec` is the rank's own; `family`: the index of its memory in the step."""
        self._spec, self._family = spec, family
        self._kernels, self._dtype = context.kernels, context.dtype
        memory, heads = spec.memory, spec.num_heads
        width, hidden = memory.latent + memory.rope, context.hidden_size
        query = heads * (spec.nope + memory.rope)
        self.q: Linear | None = None
        if spec.q_rank is None and not spec.bias:
            # Ranks divide queries; all have the latents.
            self._q_width, first, side = query, {Q: query, KV_A: width}, Side.OUTPUT
            pieces = {KV_A: (OutputPiece(width, is_whole=True),)}
            self.first = Linear(hidden, first, context, bias=False, side=side, pieces=pieces)
        else:
            self._q_width = spec.q_rank or 0
            first = {KV_A: width} if spec.q_rank is None else {Q_A: spec.q_rank, KV_A: width}
            self.first = Linear(hidden, first, context, bias=spec.bias, side=None)
            self.q = Linear(
                spec.q_rank or hidden, {"": query}, context, bias=False, side=Side.OUTPUT
            )
        both = {"": heads * (spec.nope + spec.value_dim)}
        self.kv_b = Linear(memory.latent, both, context, bias=False, side=Side.OUTPUT)
        self.kv_b.keep_numbers()
        self.kv_b.site.is_recomputed = True
        self.o = Linear(
            heads * spec.value_dim, {"": hidden}, context, bias=spec.bias, side=Side.INPUT
        )
        self._q_norm = None if spec.q_rank is None else context.empty(spec.q_rank)
        self._norm = LatentNorm(context.empty(memory.latent), spec.norm_eps)
        self._index: _Index | None = None
        if spec.index is not None and spec.index.is_own:
            assert spec.q_rank is not None, "an index reads the queries' latent"
            self._index = _Index(spec.index, spec.q_rank, context)

    @property
    def reader(self) -> Linear | None:
        """The only product that reads its input."""
        is_only = self.q is None or self._q_norm is not None
        return self.first if is_only and self._index is None else None

    def __call__(
        self, x: NormedRows, memory: Tensor | tuple[Tensor, ...], step: Step
    ) -> DeferredOutput:
        """`memory`: pages of latents; with an index, also those of its keys."""
        if self._spec.index is None:
            assert isinstance(memory, Tensor)
            q, _ = self._written(x, memory, step.memories[self._family], step)
            attended = self._attended(q, memory, step.memories[self._family], step)
        else:
            attended = self._attended_to_chosen(x, memory, step)
        return self.o(attended.flatten(1), step)

    def _attended_to_chosen(
        self, x: NormedRows, memory: Tensor | tuple[Tensor, ...], step: Step
    ) -> Tensor:
        """[tokens, heads, value_dim]"""
        both: ChosenStep = step.memories[self._family]
        pages = memory if isinstance(memory, Tensor) else memory[0]
        index = self._index
        if index is not None:
            x = whole_rows(x)  # several products read it
        q, latent_q = self._written(x, pages, both.latents, step)
        if index is not None:
            assert latent_q is not None
            assert isinstance(x, Tensor)
            angles = step.ropes[self._spec.rope]
            step.chosen.positions = index(x, latent_q, memory[1], both.rows, step, angles)
        chosen = step.chosen.positions
        if chosen is None:
            return self._attended(q, pages, both.latents, step)
        spec, kernels, weight = self._spec, self._kernels.latent, self._by_head
        adapters = self._adapters(step.lora)
        queries = kernels.absorb_queries(q, weight, spec.nope, adapters)
        attended = kernels.attend_chosen(
            queries, pages, both.rows.slots_chosen(chosen), spec.scale, spec.memory.latent
        )
        return kernels.expand_values(attended, weight, spec.nope, adapters)

    def _written(
        self, x: NormedRows, pages: Tensor, latents: LatentStep, step: Step
    ) -> tuple[Tensor, Tensor | None]:
        """Rotated queries, and the normalised latents that they are products of, if there are any.
        The step's latents are in pages."""
        q, kv, latent_q = self._projected(x, step)
        q = self._kernels.latent.latent_write(
            q, kv, step.ropes[self._spec.rope], self._norm, pages, latents.slot_mapping,
            self._dtype, is_interleaved=self._spec.is_interleaved,
        )  # fmt: skip
        return q, latent_q

    def _projected(self, x: NormedRows, step: Step) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries [tokens, heads, nope + rope] and latents with their unrotated part, or partial
        sums of either; and the queries' own latents."""
        normed = None
        both = self.first(x, step).expanded(self._kernels)
        q, kv = both[..., : self._q_width], both[..., self._q_width :]
        if self._q_norm is not None:
            normed = self._kernels.norm.sum_rms_norm(
                q, self._q_norm, self._spec.norm_eps, self._dtype
            )
        if self.q is not None:
            q = self.q(x if normed is None else normed, step).expanded(self._kernels)
        return q.view(*q.shape[:-1], self._spec.num_heads, -1), kv, normed

    def _attended(self, q: Tensor, pages: Tensor, latents: LatentStep, step: Step) -> Tensor:
        """[tokens, heads, value_dim]"""
        prompts, count = latents.prompts, latents.num_decodes
        out = q.new_empty(len(q), self._spec.num_heads, self._spec.value_dim)
        if prompts is None or self._spec.prefers_latents(
            len(q) - count, int(prompts.context_lens.sum()), prompts.num_seen
        ):
            self._to_latents(q, pages, *latents.every_row, self._adapters(step.lora), out)
            return out
        if count:
            adapters = self._adapters(latents.lora_of_decodes(step.lora))
            self._to_latents(q[:count], pages, *latents.decodes, adapters, out[:count])
        self._to_keys(q[count:], pages, latents, step, out[count:])
        return out

    def _to_latents(
        self,
        q: Tensor,
        pages: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        adapters: LatentAdapters | None,
        out: Tensor,
    ) -> None:
        """A row for each token, with `kv_b_proj` absorbed."""
        spec, kernels, weight = self._spec, self._kernels.latent, self._by_head
        queries = kernels.absorb_queries(q, weight, spec.nope, adapters)
        attended = kernels.latent_decode(
            queries, pages, page_table, lengths, spec.scale, spec.memory.latent
        )
        kernels.expand_values(attended, weight, spec.nope, adapters, out)

    def _to_keys(
        self, q: Tensor, pages: Tensor, latents: LatentStep, step: Step, out: Tensor
    ) -> None:
        """Attend from prompts to keys and values that are expanded piece by piece."""
        kernels, spec = self._kernels.latent, self._spec
        before: slice | None = None
        merged = sums = None
        for place, piece in enumerate(latents.pieces):
            k, v = self._expanded(piece, pages, latents.lora_of_keys(step.lora, place))
            queries, to = q[piece.tokens], out[piece.tokens]
            if piece.tokens != before:
                _, sums = kernels.attend_piece(queries, k, v, piece.piece, spec.scale, to)
                before, merged = piece.tokens, None
                continue
            assert sums is not None
            merged = to.float() if merged is None else merged
            further, own = kernels.attend_piece(queries, k, v, piece.piece, spec.scale)
            merged, sums = kernels.merge(merged, sums, further, own)
            to.copy_(merged)

    def _expanded(
        self, piece: ExpandedPiece, pages: Tensor, lora: LoraRows | None
    ) -> tuple[SplitKeys, Tensor]:
        """Keys, and values [keys, heads, value_dim]."""
        spec, memory = self._spec, self._spec.memory
        latents, rotated = self._kernels.latent.latent_read(
            pages, piece.slots, memory.latent, memory.rope, self._dtype
        )
        both = self.kv_b.of(latents, lora).finished(self._kernels).to(self._dtype)
        both = both.view(len(both), spec.num_heads, -1)
        return SplitKeys(both[..., : spec.nope], rotated), both[..., spec.nope :]

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
        if self._index is not None:
            yield from self._index.weights(name)

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        yield from self.first.lora_parts(name)
        for linear, own in (*self._named(), *self._named_of_index()):
            yield from linear.lora_parts(f"{name}.{own}")

    def products(self) -> Iterator[Linear]:
        yield self.first
        for linear, _ in (*self._named(), *self._named_of_index()):
            yield linear

    def _named_of_index(self) -> Iterator[tuple[Linear, str]]:
        return iter(()) if self._index is None else self._index.named()

    def _named(self) -> Iterator[tuple[Linear, str]]:
        """All products but the first, with their names in the checkpoint."""
        if self.q is not None:
            yield self.q, Q if self._q_norm is None else "q_b_proj"
        yield self.kv_b, "kv_b_proj"
        yield self.o, "o_proj"
