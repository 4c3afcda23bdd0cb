"""Attention to a window of tokens and to compressed groups of tokens, with its projections.

    r    = norm(q_a_proj(x));  q = norm(q_b_proj(r)) by head
    k    = norm(kv_proj(x))                        key and value of all heads
    e    = norm(mean of compressor.kv_proj(x), weighted by softmax(compressor.gate_proj(x) + bias))
    i    = the same with the index's own projections: what queries choose entries by
    o_b_proj(o_a_proj(attend(q, window of k, entries e), by group of heads))

What tokens add to entries is kept in pages with a window: as many tokens as an entry is made of. An
entry is computed in the step of its group's last token and kept like a key. So every page boundary
can be resumed from, and no chunk length changes what is computed.

Rows of all tokens of the step are written before entries are computed, and these before any token
attends.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from manyroots.kernels.compressed.inputs import GroupPart, KeyRows, RowNorm
from manyroots.kernels.compressed.step import RowsStep
from manyroots.kernels.norm.deferred import NormedRows, whole_rows
from manyroots.layers.context import LayerContext
from manyroots.layers.deferred_output import DeferredOutput
from manyroots.layers.linear import Linear
from manyroots.layers.spec import CompressedSpec, GroupSpec
from manyroots.layers.step import Step
from manyroots.layers.weights.fill import Fill, Fills
from manyroots.lora.targets import Side
from manyroots.store.adapter_sites import SitePart

COMPRESSOR, INDEX = "compressor", "compressor.indexer"


class _Part:
    """The weights of one vector of entries."""

    def __init__(self, name: str, dim: int, first: int, groups: GroupSpec, context: LayerContext):
        """`first`: where a token's row begins to have what it adds."""
        self._name = name
        size = (groups.size, groups.num_series * dim)
        bias = torch.empty(size, dtype=torch.float32, device=context.device)
        self.part = GroupPart(first, dim, bias, context.empty(dim), context.eps)

    def weights(self, name: str) -> Fills:
        yield f"{name}.{self._name}.position_bias", Fill(self.part.bias)
        yield f"{name}.{self._name}.kv_norm.weight", Fill(self.part.norm)


class _Compressor:
    """Of one layer: from tokens to entries, and from queries to those that they choose."""

    def __init__(self, spec: CompressedSpec, groups: GroupSpec, context: LayerContext) -> None:
        self._groups, self._kernels, self._dtype = groups, context.kernels, context.dtype
        width, series = spec.head_dim, groups.num_series
        sizes = {f"{COMPRESSOR}.{one}": series * width for one in ("kv_proj", "gate_proj")}
        self._parts = [_Part(COMPRESSOR, width, 0, groups, context)]
        self.queries: Linear | None = None
        self._num_numbers = 2 * series * (width + groups.index_dim)
        if groups.index is not None:
            index = groups.index
            first, own = 2 * series * width, series * index.head_dim
            self._parts.append(_Part(INDEX, index.head_dim, first, groups, context))
            sizes |= {f"{INDEX}.{one}": own for one in ("kv_proj", "gate_proj")}
            sizes[f"{INDEX}.scorer.weights_proj"] = index.num_heads
            self.queries = Linear(
                spec.q_rank, {"": index.num_heads * index.head_dim}, context, bias=False, side=None
            )
        # Checkpoints whose other products are quantized have these in plain numbers.
        self.rows = Linear(context.hidden_size, sizes, context.unquantized, bias=False, side=None)

    def __call__(
        self,
        x: Tensor,
        latents: Tensor,
        memory: tuple[Tensor, Tensor],
        steps: tuple[RowsStep, RowsStep],
        step: Step,
        angles: object,
    ) -> Tensor | None:
        """Write what the step adds to groups and entries; give the entries that queries choose,
        None where they attend to all. `latents`: what queries are products of; `angles`: those of
        the queries."""
        pages, entries = memory
        of_tokens, of_entries = steps
        kernels, groups = self._kernels.compressed, self._groups
        both = self.rows(x, step).finished(self._kernels).to(self._dtype)
        kernels.write_rows(both[:, : self._num_numbers], pages, of_tokens.slot_mapping)
        parts = tuple(one.part for one in self._parts)
        kernels.compress(pages, entries, parts, of_tokens, of_entries, step.ropes[groups.rope])
        if groups.index is None or self.queries is None:
            return None
        index = groups.index
        q = self.queries(latents, step).finished(self._kernels).to(self._dtype)
        q = kernels.rotate_last(q.view(len(q), index.num_heads, -1), angles, back=False)
        weights = both[:, self._num_numbers :].float()
        weights = weights * (index.num_heads * index.head_dim) ** -0.5
        return kernels.choose_entries(q, weights, entries, of_entries, index.num_chosen)

    def weights(self, name: str) -> Fills:
        yield from self.rows.weights(name)
        for part in self._parts:
            yield from part.weights(name)
        if self.queries is not None:
            yield from self.queries.weights(f"{name}.{INDEX}.q_b_proj")

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        yield from self.rows.lora_parts(name)
        if self.queries is not None:
            yield from self.queries.lora_parts(f"{name}.{INDEX}.q_b_proj")

    def products(self) -> Iterator[Linear]:
        yield self.rows
        if self.queries is not None:
            yield self.queries


class CompressedAttention:
    """Queries and keys, a compressor where there are groups, attention, and the two products
    after it."""

    def __init__(
        self, spec: CompressedSpec, families: tuple[int, ...], context: LayerContext
    ) -> None:
        """`spec` is the rank's own; `families`: which of the step's memories are its, in the order
        of `spec.memories`."""
        self._spec, self._families = spec, families
        self._kernels, self._dtype, self._shard = context.kernels, context.dtype, context.shard
        hidden, dim, heads = context.hidden_size, spec.head_dim, spec.num_heads
        self.first = Linear(
            hidden, {"q_a_proj": spec.q_rank, "kv_proj": dim}, context, bias=False, side=None
        )
        self.q = Linear(spec.q_rank, {"": heads * dim}, context, bias=False, side=Side.OUTPUT)
        self.compressor = None if spec.groups is None else _Compressor(spec, spec.groups, context)
        self.out_a = Linear(
            heads * dim // spec.out_groups, {"": spec.out_groups * spec.out_rank}, context,
            bias=False, side=Side.OUTPUT,
        )  # fmt: skip
        self.out_a.keep_numbers()  # groups of heads are multiplied separately
        self.out_b = Linear(
            spec.out_groups * spec.out_rank, {"": hidden}, context, bias=False, side=Side.INPUT
        )
        self._q_norm = context.empty(spec.q_rank)
        self._kv_norm = RowNorm(context.empty(dim), spec.norm_eps)
        self._sinks = torch.empty(heads, dtype=torch.float32, device=context.device)

    @property
    def reader(self) -> Linear | None:
        """The one product that its input is for; None: a compressor reads it, too."""
        return self.first if self.compressor is None else None

    def __call__(self, x: NormedRows, memory: tuple[Tensor, ...], step: Step) -> DeferredOutput:
        spec, kernels, norm = self._spec, self._kernels.compressed, self._kernels.norm
        x = whole_rows(x)
        steps: tuple[RowsStep, ...] = tuple(step.memories[family] for family in self._families)
        angles = step.ropes[spec.rope]
        both = self.first(x, step).finished(self._kernels).to(self._dtype)
        latents = norm.sum_rms_norm(
            both[:, : spec.q_rank], self._q_norm, spec.norm_eps, self._dtype
        )
        q = self.q(latents, step).finished(self._kernels).to(self._dtype)
        q = kernels.normed_write(
            q.view(len(q), spec.num_heads, -1), both[:, spec.q_rank :], angles, self._kv_norm,
            memory[0], steps[0].slot_mapping,
        )  # fmt: skip
        entries, chosen = None, None
        if self.compressor is not None:
            own, own_steps = (memory[1], memory[2]), (steps[1], steps[2])
            chosen = self.compressor(x, latents, own, own_steps, step, angles)
            entries = KeyRows(memory[2], steps[2], None)
        keys = KeyRows(memory[0], steps[0], spec.window)
        # Values are rotated; back by the query's position, what is left is the distance.
        attended = kernels.attend_rows(q, keys, entries, chosen, self._sinks, spec.scale, angles)
        return self.out_b(self._by_groups(attended), step)

    def _by_groups(self, attended: Tensor) -> Tensor:
        """[tokens, groups * rank]: each group of heads multiplied with its own part of o_a_proj."""
        numbers = self.out_a.weight.numbers
        assert numbers is not None, "weights are packed when they are loaded"
        groups, rank = self._spec.out_groups, self._spec.out_rank
        heads = attended.reshape(len(attended), groups, -1).transpose(0, 1)
        weight = numbers.view(groups, rank, -1).transpose(1, 2)
        out = attended.new_empty(len(attended), groups, rank)
        torch.bmm(heads, weight, out=out.transpose(0, 1))
        return out.flatten(1)

    def weights(self, name: str) -> Fills:
        yield from self.first.weights(name)
        yield from self.q.weights(f"{name}.q_b_proj")
        yield from self.out_a.weights(f"{name}.o_a_proj")
        yield from self.out_b.weights(f"{name}.o_b_proj")
        yield f"{name}.q_a_norm.weight", Fill(self._q_norm)
        yield f"{name}.kv_norm.weight", Fill(self._kv_norm.weight)
        yield f"{name}.sinks", Fill(self._sinks, 0, self._shard)
        if self.compressor is not None:
            yield from self.compressor.weights(name)

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        """None of o_a_proj: PEFT adds an adapter's output of all groups to that of each, which
        fails."""
        yield from self.first.lora_parts(name)
        yield from self.q.lora_parts(f"{name}.q_b_proj")
        yield from self.out_b.lora_parts(f"{name}.o_b_proj")
        if self.compressor is not None:
            yield from self.compressor.lora_parts(name)

    def products(self) -> Iterator[Linear]:
        yield from (self.first, self.q, self.out_a, self.out_b)
        if self.compressor is not None:
            yield from self.compressor.products()
