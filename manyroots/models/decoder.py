"""The decoder, built from a description: one for every architecture and device.

Takes tokens and a `Step`; writes keys, values and states into the arenas, and gives hidden states
and logits. Architectures differ only in their `ModelSpec`, devices only in the kernel set.

    x -> norm -> mixers -> + x
      -> norm -> feed-forward block -> + x

The residual x may be several streams (`layers/hyper_connections.py`). A product is added to it by
the norm after it; see `layers/deferred_output.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from manyroots.layers.hyper_connections import HyperConnection, ManyStreams, OneStream
from manyroots.layers.linear import Linear
from manyroots.layers.mixers import make_mixer
from manyroots.layers.mlp import GatedMLP
from manyroots.layers.moe import SparseMLP
from manyroots.layers.norm import NoNorm, RMSNorm
from manyroots.layers.prediction import PredictionInput
from manyroots.layers.shared_moe import SharedExpertMLP
from manyroots.layers.spec import (
    BlockSpec,
    CompressedSpec,
    DenseSpec,
    ExpertsSpec,
    LayerSpec,
    SharedSpec,
    memories_of,
)
from manyroots.layers.step import Step
from manyroots.layers.weights.fill import Fill, Fills
from manyroots.layers.weights.formats import PLAIN, WeightFormat
from manyroots.lora.targets import Target
from manyroots.models.families import model_families
from manyroots.models.forms import form_of, shortest_prefix
from manyroots.models.spec import ModelSpec
from manyroots.store.adapter_base import BaseRows
from manyroots.store.adapter_pool import AdapterPool
from manyroots.store.adapter_sites import SitePart
from manyroots.store.arena import Arena

_BLOCKS: dict[type[BlockSpec], Any] = {
    DenseSpec: GatedMLP,
    ExpertsSpec: SparseMLP,
    SharedSpec: SharedExpertMLP,
}


class Sublayer:
    """One half of a layer: a computation and the norms around it."""

    def __init__(self, spec: LayerSpec, reader: Linear | None, context: LayerContext) -> None:
        """`reader`: the only product that reads its input."""
        self.reader = reader
        self._spec, self._context = spec, context
        hidden = context.hidden_size
        self.norm = RMSNorm(hidden, context) if spec.has_pre_norms else NoNorm(context)
        self._post = RMSNorm(hidden, context) if spec.has_post_norms else None
        self.hyper = None if spec.hyper is None else HyperConnection(spec.hyper, context)

    def whole(self, product: DeferredOutput) -> DeferredOutput:
        """The sum over ranks, with the remaining norm and factor attached."""
        context = self._context
        product = product.over_ranks(context.shard, context.kernels, context.dtype)
        factor = product.factor * self._spec.factor
        if self._post is None:
            return product.with_factor(factor)
        return replace(product, post=self._post.weight, factor=factor)

    def weights(self, norm: str, post: str, hyper: str) -> Fills:
        yield from self.norm.weights(norm)
        if self._post is not None:
            yield from self._post.weights(post)
        if self.hyper is not None:
            yield from self.hyper.weights(hyper)


class DecoderLayer:
    """Mixers and a feed-forward block, or one of the two."""

    def __init__(
        self, spec: LayerSpec, families: Sequence[Sequence[int]], context: LayerContext
    ) -> None:
        """`families`: for each mixer, the indexes of its memories in the step's `memories`."""
        self.spec, self._kernels = spec, context.kernels
        self.mixers = [
            make_mixer(mixer, own, context)
            for mixer, own in zip(spec.mixers, families, strict=True)
        ]
        self.feed_forward: GatedMLP | SparseMLP | SharedExpertMLP | None = None
        self.mixing: Sublayer | None = None
        self.feeding: Sublayer | None = None
        if self.mixers:
            reader = self.mixers[0].reader if len(self.mixers) == 1 else None
            self.mixing = Sublayer(spec, reader, context)
        if spec.feed_forward is not None:
            block = _BLOCKS[type(spec.feed_forward)](spec.feed_forward, context)
            self.feed_forward, self.feeding = block, Sublayer(spec, block.reader, context)

    def mix(self, x: NormedRows, memories: Sequence[Any], step: Step) -> DeferredOutput:
        """The output of its mixers for `x`; `memories` are theirs."""
        assert self.mixing is not None
        both = zip(self.mixers, memories, strict=True)
        products = [mixer(x, memory, step) for mixer, memory in both]
        return self.mixing.whole(sum_of(products, self._kernels))

    def feed(self, x: NormedRows, step: Step) -> DeferredOutput:
        """The output of its feed-forward block for `x`."""
        assert self.feeding is not None
        assert self.feed_forward is not None
        return self.feeding.whole(self.feed_forward(x, step))

    def weights(self, name: str) -> Fills:
        if self.mixing is not None:
            post = f"{name}.post_attention_layernorm"
            yield from self.mixing.weights(f"{name}.input_layernorm", post, f"{name}.attn_hc")
        for mixer, spec in zip(self.mixers, self.spec.mixers, strict=True):
            yield from mixer.weights(f"{name}.{spec.name}")
        if self.feeding is None or self.feed_forward is None:
            return
        norm = "pre_feedforward" if self.spec.has_post_norms else "post_attention"
        norm = norm if self.mixers else "input"
        post = f"{name}.post_feedforward_layernorm"
        yield from self.feeding.weights(f"{name}.{norm}_layernorm", post, f"{name}.ffn_hc")
        yield from self.feed_forward.weights(self._block_name(name))

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        for mixer, spec in zip(self.mixers, self.spec.mixers, strict=True):
            yield from mixer.lora_parts(f"{name}.{spec.name}")
        if self.feed_forward is not None:
            yield from self.feed_forward.lora_parts(self._block_name(name))

    def _block_name(self, name: str) -> str:
        assert self.spec.feed_forward is not None
        block = self.spec.feed_forward.name
        return f"{name}.{block}" if block else name

    def products(self) -> Iterator[Linear]:
        for mixer in self.mixers:
            yield from mixer.products()
        if self.feed_forward is not None:
            yield from self.feed_forward.products()


@dataclass(slots=True)
class Prediction:
    """The layer that predicts tokens ahead (MTP). Adapters do not apply to it."""

    input: PredictionInput
    layer: DecoderLayer
    norm: RMSNorm
    family: int
    """The family that stores the model's hidden states."""
    states: Tensor | None = None
    """[num_pages, 1, hidden_size]: its memory; None before `attach`."""

    def weights(self) -> Fills:
        yield from self.input.weights("mtp")
        yield from self.layer.weights("mtp.layers.0")
        yield from self.norm.weights("mtp.norm")

    def products(self) -> Iterator[Linear]:
        yield from self.input.products()
        yield from self.layer.products()


class Decoder:
    """A model's weights, and the forward pass."""

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
        """`spec` is the rank's own: see `models/sharding.py`. `kernels`: set if they are not the
        device's. `format`: the format of products' weights."""
        self.spec, self.shard = spec, shard
        self.dtype, self.device, self.format = dtype, device, format
        self.kernels = kernels = kernels_for(device) if kernels is None else kernels
        self.families = model_families(spec)
        self.num_paged = sum(not family.is_state for family in self.families)
        """Families of pages; those of states come after them."""
        number_of = {family.memory: number for number, family in enumerate(self.families)}
        context = LayerContext(
            hidden_size=spec.hidden_size, eps=spec.rms_norm_eps, norm_offset=spec.norm_offset,
            dtype=dtype, device=device, kernels=kernels, shard=shard, format=format,
        )  # fmt: skip
        self.embedding = Embedding(
            spec.vocab_size, context, scale=spec.embedding_scale,
            rounds_scale=spec.rounds_embedding_scale,
        )  # fmt: skip
        layers = [
            DecoderLayer(
                layer,
                [[number_of[one] for one in memories_of(mixer)] for mixer in layer.mixers],
                context,
            )
            for layer in spec.all_layers
        ]
        self.layers = layers[: spec.num_layers]
        self.norm = RMSNorm(spec.hidden_size, context)
        self.prediction: Prediction | None = None
        """The layer that predicts tokens ahead, if it is used."""
        if spec.prediction is not None:
            self.prediction = Prediction(
                PredictionInput(context),
                layers[-1],
                RMSNorm(spec.hidden_size, context),
                number_of[spec.prediction.memory],
            )
        hyper = spec.layers[-1].hyper
        self.end = None if hyper is None else HyperConnection(hyper, context, is_end=True)
        """Joins the streams of a model with hyper-connections."""
        self.head = LmHead(
            spec.vocab_size, context, factor=spec.logits_factor, cap=spec.logits_cap,
            tied_to=self.embedding if spec.tie_word_embeddings else None,
        )  # fmt: skip
        self.num_bytes = 0
        """Bytes of its weights; known once they are loaded."""
        self.ropes: tuple[RopeTable, ...] = ()
        """Tables of every position, by kind; see `attach`."""
        self._memories: list[list[Any]] = []
        self._num_run: int | None = None
        """Layers that `hidden` computes; None: all."""
        self._num_distinct: int | None = None
        """Layers that launch every kernel; None: not known, because memory is new."""

    @contextmanager
    def one_of_each_kind(self) -> Iterator[None]:
        """Meanwhile only the first layers are computed, as few as launch every kernel that all
        layers would: to compile and to load kernels. Results are wrong."""
        if self._num_distinct is None:
            both = zip(self.layers, self._memories, strict=False)
            self._num_distinct = shortest_prefix([form_of(own) for own in both])
        self._num_run = self._num_distinct
        try:
            yield
        finally:
            self._num_run = None

    def attach(self, arenas: Sequence[Arena], pool: AdapterPool | None, *, max_len: int) -> None:
        """Give it memory: an arena for each family, the adapters' pool if there is one, and angles
        for this many positions."""
        arena_of = {
            family.memory: (arena, family.layers)
            for family, arena in zip(self.families, arenas, strict=True)
        }
        self._memories, self._num_distinct = [], None
        for index, layer in enumerate(self.spec.all_layers):
            own = []
            for mixer in layer.mixers:
                found = (arena_of[memory] for memory in memories_of(mixer))
                parts = tuple(arena.layer(layers.index(index)) for arena, layers in found)
                own.append(parts if isinstance(mixer, CompressedSpec) else parts[0])
            self._memories.append(own)
        if self.prediction is not None:
            self.prediction.states = arenas[self.prediction.family].layer(0)
        # Half a MiB per thousand positions and kind; a step looks up its rows.
        positions = torch.arange(max_len, device=self.device)
        self.ropes = tuple(
            RopeTable.at(
                positions - positions % rope.group,
                torch.tensor(
                    rope.frequencies_for(max_len), dtype=torch.float32, device=self.device
                ),
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
        """Prepare the weights for products; call whenever they were filled."""
        predicting = () if self.prediction is None else self.prediction.products()
        for linear in (*self._products(), *predicting):
            linear.weight.pack()

    def _products(self) -> list[Linear]:
        """Those that adapters may change."""
        return [
            *(linear for layer in self.layers for linear in layer.products()), self.head.product
        ]  # fmt: skip

    def hidden(self, tokens: Tensor, step: Step) -> Tensor:
        """Hidden states [num_tokens, hidden_size] after the final norm; only of the tokens at
        `logits_indices`, if the step has them. After the last layer's mixers only these are
        computed."""
        embedded = self.embedding(tokens, step)
        residual = (
            OneStream(embedded, self.kernels)
            if self.end is None
            else ManyStreams(embedded, self.kernels, self.end)
        )
        step = replace(step, tokens=tokens)
        product: DeferredOutput | None = None
        layers = self.layers[: self._num_run]
        last = max((index for index, layer in enumerate(layers) if layer.mixers), default=-1)
        for index, layer in enumerate(layers):
            if step.before_layer is not None:
                step.before_layer(index)
            if layer.mixing is not None:
                read = residual.read(layer.mixing, product)
                product = layer.mix(read, self._memories[index], step)
            if index == last and product is not None and step.logits_indices is not None:
                at = step.logits_indices.at
                if len(at) == 0:
                    return embedded[at]
                residual.only(at)
                product = product.rows(at, self.kernels)
                step = replace(step, lora=step.logits_indices.lora, tokens=tokens[at])
            if layer.feeding is not None:
                product = layer.feed(residual.read(layer.feeding, product), step)
        assert product is not None
        return residual.end(self.norm, product)

    def predict(
        self, tokens: Tensor, hidden: Tensor, step: Step, *, only_memory: bool = False
    ) -> Tensor | None:
        """Hidden states that predict the tokens after `tokens`, each of which follows a token with
        one of the states `hidden`. `only_memory`: write keys and values, and give None."""
        prediction = self.prediction
        assert prediction is not None
        layer, memories = prediction.layer, self._memories[-1]
        assert layer.mixing is not None
        assert layer.feeding is not None
        step = replace(step, lora=None, logits_indices=None, tokens=tokens)
        x = prediction.input(self.embedding(tokens, step), hidden)
        residual = OneStream(x, self.kernels)
        product = layer.mix(residual.read(layer.mixing, None), memories, step)
        if only_memory:
            return None
        product = layer.feed(residual.read(layer.feeding, product), step)
        return residual.end(prediction.norm, product)

    def logits(self, hidden: Tensor, rows: LoraRows | None) -> Tensor:
        """Logits [num_rows, vocab_size] in the model's dtype, for the rows that need them.

        `rows`: the adapters of these rows, not of all tokens of the step.
        """
        return self.head(hidden, rows)

    def weights(self) -> dict[str, Fill]:
        """A checkpoint's tensor names, with the destination of each."""
        return dict(self._weights())

    def _weights(self) -> Fills:
        yield from self.embedding.weights("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"model.layers.{index}")
        yield from self.norm.weights("model.norm")
        if self.end is not None:
            yield from self.end.weights("model.hc_head")
        yield from self.head.weights("lm_head")
        if self.prediction is not None:
            yield from self.prediction.weights()

    def lora_parts(self) -> dict[str, SitePart]:
        """The weights that adapters may change, by name, with their products."""
        return dict(self._lora_parts())

    def adapter_targets(self) -> dict[str, Target]:
        """The weights that adapters may change, to check adapter files."""
        return {name: part.target for name, part in self._lora_parts()}

    def base_rows(self) -> dict[str, BaseRows]:
        """This rank's part of the weights that adapter files may repeat."""
        return {
            "model.embed_tokens": BaseRows(self.embedding.weight, 0),
            "lm_head": self.head.base_rows(),
        }

    def _lora_parts(self) -> Iterator[tuple[str, SitePart]]:
        yield from self.embedding.lora_parts("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            yield from layer.lora_parts(f"model.layers.{index}")
        yield from self.head.lora_parts("lm_head")
