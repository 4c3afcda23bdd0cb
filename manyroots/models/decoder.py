"""The decoder, put together from a description: one for every architecture and device.

Takes tokens and a `Step`; writes keys, values and states into the arenas, gives hidden states and
from those logits. What differs between architectures is in their `ModelSpec`, what differs between
devices in the kernel set.

    x -> norm -> mixers -> + x
      -> norm -> feed-forward block -> + x

A product is added to the residual stream by the norm behind it; see `layers/deferred_output.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from manyroots.distributed.shard import WHOLE, Shard
from manyroots.kernels.choice import Kernels, kernels_for
from manyroots.kernels.lora_ops.sites import LoraRows
from manyroots.kernels.norm.deferred import NormedRows
from manyroots.kernels.qk_rope_kv_write.inputs import RopeTable
from manyroots.layers.context import LayerContext
from manyroots.layers.deferred_output import DeferredOutput, sum_of
from manyroots.layers.embedding import Embedding, LmHead
from manyroots.layers.linear import Linear
from manyroots.layers.mixers import make_mixer
from manyroots.layers.mlp import GatedMLP
from manyroots.layers.moe import SparseMLP
from manyroots.layers.norm import RMSNorm
from manyroots.layers.shared_moe import SharedExpertMLP
from manyroots.layers.spec import BlockSpec, DenseSpec, ExpertsSpec, LayerSpec, SharedSpec
from manyroots.layers.step import Step
from manyroots.layers.weights.fill import Fill, Fills
from manyroots.layers.weights.formats import PLAIN, WeightFormat
from manyroots.lora.targets import Target
from manyroots.models.families import families
from manyroots.models.spec import ModelSpec
from manyroots.store.adapter_base import BaseRows
from manyroots.store.adapter_pool import AdapterPool
from manyroots.store.adapter_sites import SitePart
from manyroots.store.arena import PageArena, StateArena

_BLOCKS: dict[type[BlockSpec], Any] = {
    DenseSpec: GatedMLP,
    ExpertsSpec: SparseMLP,
    SharedSpec: SharedExpertMLP,
}


class DecoderLayer:
    """Mixers and a feed-forward block, with the norms in front of them and, perhaps, behind."""

    def __init__(self, spec: LayerSpec, families: Sequence[int], context: LayerContext) -> None:
        """`families`: of each mixer, which of the step's `kv` or `states` is its."""
        self.spec = spec
        self._shard, self._kernels, self._dtype = context.shard, context.kernels, context.dtype

        def norm() -> RMSNorm:
            return RMSNorm(context.hidden_size, context)

        self.input_norm, self.mlp_norm = norm(), norm()
        self._post_norms = (norm(), norm()) if spec.has_post_norms else None
        self.mixers = [
            make_mixer(mixer, family, context)
            for mixer, family in zip(spec.mixers, families, strict=True)
        ]
        block = spec.feed_forward
        self.feed_forward: GatedMLP | SparseMLP | SharedExpertMLP = _BLOCKS[type(block)](
            block, context
        )

    @property
    def reader(self) -> Linear | None:
        """The one product that the layer's input is for."""
        return self.mixers[0].reader if len(self.mixers) == 1 else None

    def mix(self, x: NormedRows, memories: Sequence[Any], step: Step) -> DeferredOutput:
        """The layer's first half. `x` is the residual, normalised; `memories` are the mixers'."""
        both = zip(self.mixers, memories, strict=True)
        products = [mixer(x, memory, step) for mixer, memory in both]
        return self._whole(sum_of(products, self._kernels), 0)

    def feed(self, residual: Tensor, mixed: DeferredOutput, step: Step) -> DeferredOutput:
        """The second half. Adds the first one's product onto the residual in place; gives the
        block's, which the next layer's norm adds."""
        x = self.mlp_norm.after(residual, mixed, self.feed_forward.reader)
        return self._whole(self.feed_forward(x, step), 1)

    def _whole(self, product: DeferredOutput, which: int) -> DeferredOutput:
        """The sum over ranks, and with the norm and the factor that it is still to have."""
        product = product.over_ranks(self._shard, self._kernels, self._dtype)
        factor = product.factor * self.spec.factor
        if self._post_norms is None:
            return product.with_factor(factor)
        post = self._post_norms[which].weight
        return DeferredOutput(product.sums, product.lora, post, factor)

    def weights(self, name: str) -> Fills:
        yield from self.input_norm.weights(f"{name}.input_layernorm")
        for mixer, spec in zip(self.mixers, self.spec.mixers, strict=True):
            yield from mixer.weights(f"{name}.{spec.name}")
        if self._post_norms is None:
            yield from self.mlp_norm.weights(f"{name}.post_attention_layernorm")
        else:
            after_mixer, after_block = self._post_norms
            yield from after_mixer.weights(f"{name}.post_attention_layernorm")
            yield from self.mlp_norm.weights(f"{name}.pre_feedforward_layernorm")
            yield from after_block.weights(f"{name}.post_feedforward_layernorm")
        yield from self.feed_forward.weights(self._block_name(name))

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        for mixer, spec in zip(self.mixers, self.spec.mixers, strict=True):
            yield from mixer.lora_parts(f"{name}.{spec.name}")
        yield from self.feed_forward.lora_parts(self._block_name(name))

    def _block_name(self, name: str) -> str:
        block = self.spec.feed_forward.name
        return f"{name}.{block}" if block else name

    def products(self) -> Iterator[Linear]:
        for mixer in self.mixers:
            yield from mixer.products()
        yield from self.feed_forward.products()


class Decoder:
    """A model's weights, and the one way through them."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = WHOLE,
        kernels: Kernels | None = None,
        format: WeightFormat = PLAIN,
    ) -> None:
        """`spec` is the rank's own: see `models/sharding.py`. `kernels`: where they are not those
        of the device. `format`: how weights of products are kept."""
        self.spec, self.shard = spec, shard
        self.dtype, self.device, self.format = dtype, device, format
        self.kernels = kernels = kernels_for(device) if kernels is None else kernels
        self.families = families(spec.layers)
        self.num_paged = sum(not family.is_state for family in self.families)
        """Families of pages; those of states come behind them."""
        number_of = {family.memory: number for number, family in enumerate(self.families)}
        context = LayerContext(
            hidden_size=spec.hidden_size, eps=spec.rms_norm_eps, norm_offset=spec.norm_offset,
            dtype=dtype, device=device, kernels=kernels, shard=shard, format=format,
        )  # fmt: skip
        self.embedding = Embedding(
            spec.vocab_size, context, scale=spec.embedding_scale,
            rounds_scale=spec.rounds_embedding_scale,
        )  # fmt: skip
        self.layers = [
            DecoderLayer(
                layer,
                [self._own_number(number_of[mixer.memory]) for mixer in layer.mixers],
                context,
            )
            for layer in spec.layers
        ]
        self.norm = RMSNorm(spec.hidden_size, context)
        self.head = LmHead(
            spec.vocab_size, context, factor=spec.logits_factor,
            tied_to=self.embedding if spec.tie_word_embeddings else None,
        )  # fmt: skip
        self.num_bytes = 0
        """What its weights take; known once they are loaded."""
        self.ropes: tuple[RopeTable, ...] = ()
        """Of every position, by kind; see `attach`."""
        self._memories: list[list[Tensor | tuple[Tensor, ...]]] = []

    def _own_number(self, family: int) -> int:
        """Among the families of pages, or among those of states."""
        return family if family < self.num_paged else family - self.num_paged

    def attach(
        self, arenas: Sequence[PageArena | StateArena], pool: AdapterPool | None, *, max_len: int
    ) -> None:
        """Give it memory: an arena for each family, the adapters' pool if there is one, and angles
        for so many positions."""
        arena_of = {
            family.memory: (arena, family.layers)
            for family, arena in zip(self.families, arenas, strict=True)
        }
        self._memories = []
        for index, layer in enumerate(self.spec.layers):
            found = (arena_of[mixer.memory] for mixer in layer.mixers)
            self._memories.append([arena.layer(layers.index(index)) for arena, layers in found])
        # Half a MiB per thousand positions and kind; a step looks its rows up.
        positions = torch.arange(max_len, device=self.device)
        self.ropes = tuple(
            RopeTable.at(
                positions,
                torch.tensor(rope.frequencies, dtype=torch.float32, device=self.device),
                rope.attention_scaling,
            )
            for rope in self.spec.ropes
        )
        self._find_adapters(pool)

    def _find_adapters(self, pool: AdapterPool | None) -> None:
        if pool is None:
            return
        self.embedding.pooled = pool.embedding_sites.get(self.embedding.site)
        for linear in self._products():
            linear.pooled = pool.sites.get(linear.site)
        for layer in self.layers:
            block = layer.feed_forward
            if isinstance(block, SharedExpertMLP):
                block = block.sparse
            if isinstance(block, SparseMLP):
                sites = pool.expert_sites
                gate_up = sites.get(block.experts.gate_up_site)
                down = sites.get(block.experts.down_site)
                block.pooled = None if gate_up is None or down is None else (gate_up, down)

    def pack_weights(self) -> None:
        """Make operands of products' weights, whenever they were filled."""
        for linear in self._products():
            linear.weight.pack()

    def _products(self) -> list[Linear]:
        return [
            *(linear for layer in self.layers for linear in layer.products()), self.head.product
        ]  # fmt: skip

    def hidden(self, tokens: Tensor, step: Step) -> Tensor:
        """Hidden states [num_tokens, hidden_size] after the final norm; of the tokens at
        `logits_indices`, where the step says which. Behind the last layer's mixers, the others are
        nobody's business."""
        residual = self.embedding(tokens, step)
        x: NormedRows = self.layers[0].input_norm.first(residual)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            if step.before_layer is not None:
                step.before_layer(index)
            mixed = layer.mix(x, self._memories[index], step)
            if index == last and step.logits_indices is not None:
                at = step.logits_indices.at
                residual, mixed = residual[at], mixed.rows(at, self.kernels)
                step = replace(step, lora=step.logits_indices.lora)
                if len(at) == 0:
                    return residual
            product = layer.feed(residual, mixed, step)
            if index < last:
                following = self.layers[index + 1]
                x = following.input_norm.after(residual, product, following.reader)
        return self.norm.rows_after(residual, product)

    def logits(self, hidden: Tensor, rows: LoraRows | None) -> Tensor:
        """Scores [num_rows, vocab_size] in the model's dtype, for the rows that need them.

        `rows`: the adapters of these rows, not of all tokens of the step.
        """
        return self.head(hidden, rows)

    def weights(self) -> dict[str, Fill]:
        """A checkpoint's tensor names, and where each goes."""
        return dict(self._weights())

    def _weights(self) -> Fills:
        yield from self.embedding.weights("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"model.layers.{index}")
        yield from self.norm.weights("model.norm")
        yield from self.head.weights("lm_head")

    def lora_parts(self) -> dict[str, SitePart]:
        """What adapters may change, by name, and in which product it is computed."""
        return dict(self._lora_parts())

    def adapter_targets(self) -> dict[str, Target]:
        """What adapters may change, for whoever checks their files."""
        return {name: part.target for name, part in self._lora_parts()}

    def base_rows(self) -> dict[str, BaseRows]:
        """Weights that adapters' files may repeat: what this rank has of them."""
        return {
            "model.embed_tokens": BaseRows(self.embedding.weight, 0),
            "lm_head": self.head.base_rows(),
        }

    def _lora_parts(self) -> Iterator[tuple[str, SitePart]]:
        yield from self.embedding.lora_parts("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            yield from layer.lora_parts(f"model.layers.{index}")
        yield from self.head.lora_parts("lm_head")
