"""Lower bounds: the bytes that a step must read, and the operations of a prompt.

Takes a model's spec; gives bytes of a decode step and operations of a prompt, counted, not
measured. A decode step reads every weight of its products once (of experts, the number that this
many tokens are expected to choose). It also reads the keys and values that each row sees and the
adapters of its rows, and reads and writes each row's state. A prompt's operations are only those of
its weights' products: attention and scans are not counted, though they take time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from manyroots.layers.spec import BlockSpec, DenseSpec, ExpertsSpec, SharedSpec
from manyroots.lora.targets import Target
from manyroots.models.families import families
from manyroots.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Roofline:
    """The bounds of one model in one dtype."""

    spec: ModelSpec
    dtype: torch.dtype
    weight_itemsize: float
    """Bytes per number of the layers' products: less than the dtype's if they are in FP8. For some
    that are kept unquantized it is too little, so that the bytes remain a lower bound."""
    expert_itemsize: float | None = None
    """Bytes per number of experts only; None: the same."""

    def decode_bytes(self, batch: int, context: float) -> float:
        """The least bytes that a step of `batch` rows reads and writes, with this many tokens
        each."""
        return self.weight_bytes(batch) + batch * self.row_bytes(context)

    def weight_bytes(self, num_tokens: int) -> float:
        """The weights that a step of this many tokens is expected to read; of the embedding only
        its tokens' rows."""
        hidden, size = self.spec.hidden_size, self.dtype.itemsize
        layers = sum(
            sum(mixer.num_weights(hidden) for mixer in layer.mixers)
            + _weights_read(layer.feed_forward, hidden, num_tokens)
            for layer in self.spec.layers
        )
        whole = (self.spec.vocab_size + num_tokens) * hidden
        total = layers * self.weight_itemsize + whole * size
        if self.expert_itemsize is not None:
            less = self.weight_itemsize - self.expert_itemsize
            total -= less * self._of_experts(num_tokens)
        return total

    def _of_experts(self, num_tokens: int) -> float:
        """The part of the read weights that is in experts."""
        blocks = (layer.experts for layer in self.spec.layers)
        return sum(
            expected_experts(block, num_tokens) * _of_one(block, self.spec.hidden_size)
            for block in blocks
            if block is not None
        )

    def row_bytes(self, context: float) -> float:
        """The bytes of one row's memory in a step: keys and values are read, states are read and
        written."""
        total = 0.0
        for family in families(self.spec.layers):
            total += family.unit_bytes(1, self.dtype) * family.memory.units_read(context)
        return total

    def adapter_bytes(
        self, targets: Iterable[Target], rank: int, num_adapters: int, batch: int
    ) -> float:
        """Bytes that `num_adapters` of this rank on these targets add to a step; for experts the
        expected pairs of adapter and expert."""
        used = min(num_adapters, batch)
        if not used:
            return 0.0
        chosen = next((layer.experts for layer in self.spec.layers if layer.experts), None)
        total = 0.0
        for target in targets:
            pairs = float(used)
            if target.num_experts and chosen is not None:
                pairs *= expected_experts(chosen, batch / used)
            total += pairs * rank * (target.in_features + target.out_features)
        return total * self.dtype.itemsize

    def prompt_flops(self, batch: int, prompt_len: int) -> float:
        """Operations of the weights' products for `batch` prompts; logits only for the last
        tokens."""
        hidden = self.spec.hidden_size
        by_token = sum(
            sum(mixer.num_weights(hidden) for mixer in layer.mixers)
            + _weights_used(layer.feed_forward, hidden)
            for layer in self.spec.layers
        )
        return 2.0 * batch * (prompt_len * by_token + self.spec.vocab_size * hidden)


def expected_experts(spec: ExpertsSpec, num_tokens: float) -> float:
    """The expected number of different experts that this many tokens choose at random."""
    missed = 1.0 - spec.experts_per_token / spec.num_experts
    return spec.num_experts * (1.0 - math.pow(missed, num_tokens))


def _weights_read(spec: BlockSpec | None, hidden: int, num_tokens: int) -> float:
    if spec is None:
        return 0.0
    if isinstance(spec, SharedSpec):
        return _weights_read(spec.experts, hidden, num_tokens) + _of_shared(spec, hidden)
    if isinstance(spec, DenseSpec):
        return _of_one(spec, hidden)
    router = spec.num_experts * hidden
    return router + expected_experts(spec, num_tokens) * _of_one(spec, hidden)


def _weights_used(spec: BlockSpec | None, hidden: int) -> float:
    """Weights used by one token."""
    if spec is None:
        return 0.0
    if isinstance(spec, SharedSpec):
        return _weights_used(spec.experts, hidden) + _of_shared(spec, hidden)
    if isinstance(spec, DenseSpec):
        return _of_one(spec, hidden)
    return spec.num_experts * hidden + spec.experts_per_token * _of_one(spec, hidden)


def _of_shared(spec: SharedSpec, hidden: int) -> int:
    return _of_one(spec.shared, hidden) + (0 if spec.gate is None else hidden)


def _of_one(spec: DenseSpec | ExpertsSpec, hidden: int) -> int:
    """A dense block's weights, or one expert's."""
    products = 3 if isinstance(spec, ExpertsSpec) or spec.is_gated else 2
    return products * hidden * spec.intermediate_size
