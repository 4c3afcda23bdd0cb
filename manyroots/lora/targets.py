"""Which weights of a model an adapter may change, and their shapes.

Made once from the model; read where adapter files are checked and where they get memory.
Names are those of the checkpoint, without `.weight`: `model.layers.0.self_attn.q_proj`. The experts
of a layer are one target each for gate, up and down: `model.layers.0.mlp.experts.gate_proj`. Their
router is a linear one: `model.layers.0.mlp.gate`, or what the checkpoint calls it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class TargetKind(enum.Enum):
    """How a low-rank pair enters."""

    LINEAR = "linear"
    """y += scaling * B (A x), with A [rank, in] and B [out, rank]; also the head."""
    EMBEDDING = "embedding"
    """in_features is the vocabulary: y += scaling * B A[token]."""
    EXPERTS = "experts"
    """LINEAR, once per expert; either side may be one matrix shared by all of them."""


class Side(enum.Enum):
    """What of a projection is divided among ranks. An adapter's delta B A follows the weight that
    it changes: by output B is divided, by input A."""

    OUTPUT = "output"
    INPUT = "input"


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """One of several that lie one after the other in a weight's output."""

    size: int
    """What this rank has of it."""
    is_whole: bool = False
    """Whether every rank has all of it."""


@dataclass(frozen=True, slots=True)
class Target:
    """One weight that adapters may change."""

    kind: TargetKind
    in_features: int
    out_features: int
    num_experts: int | None = None
    """With EXPERTS alone."""
    is_interleaved: bool = False
    """With EXPERTS alone: the model's own parameters are [in, out] for each expert, with gate and
    up by turns (gpt-oss). Adapters that PEFT made for such parameters are, too."""
    pieces: tuple[OutputPiece, ...] = ()
    """What its output consists of, where ranks divide that piece by piece."""
    side: Side | None = None
    """What ranks divide of it; None: all have the whole."""
    is_recomputed: bool = False
    """Whether it is computed again for tokens that are cached, as latent attention's keys and
    values are. An adapter that begins within a sequence can't change it."""


Targets = Mapping[str, Target]
"""By name, in the order of the model."""


def adapter_bytes(targets: Targets, rank: int, bytes_per_element: int) -> int:
    """Memory of an adapter that changes every target with this rank: the most a slot can need."""
    total = 0
    for target in targets.values():
        size = rank * (target.in_features + target.out_features)
        total += size * (target.num_experts or 1)
    return total * bytes_per_element
