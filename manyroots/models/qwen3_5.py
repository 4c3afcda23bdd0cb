"""Qwen3.5, dense and with experts: the layers of Qwen3-Next, with other names for some weights.

The delta net's projections are four. Checkpoints also see images; their text part is served.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from manyroots.models.qwen3_next import hybrid, is_drafting, shared_experts
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.experts import per_expert

_TEXT = "model.language_model."
_OTHER_PARTS = ("model.visual.", "visual.")


def describe(reader: ConfigReader) -> ModelSpec:
    """Qwen3.5 from 0.8B to 27B."""
    block = reader.dense(bias=False)
    return hybrid(reader, [block] * reader.text.num_hidden_layers, is_fused=False)


def describe_moe(reader: ConfigReader) -> ModelSpec:
    """Qwen3.5-35B-A3B and larger, whose config has no word on the weights of the chosen experts:
    they always add up to one."""
    block = shared_experts(reader, renormalises=True)
    return hybrid(reader, [block] * reader.text.num_hidden_layers, is_fused=False)


def translate(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's tensors under the names of the text model alone, experts one by one."""
    return per_expert(_of_text(weights))


def _of_text(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        if name.startswith(_OTHER_PARTS) or is_drafting(name):
            continue
        if name.startswith(_TEXT):
            name = "model." + name.removeprefix(_TEXT)
        yield name, tensor
