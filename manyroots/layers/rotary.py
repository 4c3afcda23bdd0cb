"""Rotary position embedding.

`rope_frequencies` computes frequencies from a config once, at load. `kernels/qk_rope_kv_write`
rotates queries and keys with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from manyroots.errors import ModelError
from manyroots.layers.rope_scaling import SCALINGS, long_frequencies

SUPPORTED_TYPES = tuple(SCALINGS)
"""Types whose angles depend only on the position. The others (dynamic) change with the length of
the sequence, so keys cached at one length would be wrong at another. Longrope has two sets of
angles; a server uses one of them, chosen by its longest context, as vLLM does."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Frequencies of the rotation, and the factor of cosines and sines."""

    frequencies: tuple[float, ...]
    attention_scaling: float
    long_frequencies: tuple[float, ...] = ()
    """Frequencies for servers whose contexts may be longer than `short_len`; empty if always the
    same."""
    short_len: int = 0
    group: int = 1
    """Tokens that are rotated alike, by the first position of their group."""

    def frequencies_for(self, max_len: int) -> tuple[float, ...]:
        """Frequencies for a server with contexts of at most this many tokens."""
        is_long = self.long_frequencies and max_len > self.short_len
        return self.long_frequencies if is_long else self.frequencies


def check_rope_type(kind: str) -> None:
    """Raise ModelError for an unsupported type of rotary scaling."""
    if kind not in SUPPORTED_TYPES:
        raise ModelError(
            f"the model uses rotary scaling of type {kind!r}; this version serves "
            f"{', '.join(SUPPORTED_TYPES)}. Choose a checkpoint with one of these."
        )


def rope_frequencies(
    config: Any,
    head_dim: int,
    factors: Sequence[float] | None = None,
    layer_type: str | None = None,
    *,
    is_partial: bool = False,
) -> RopeSpec:
    """Read `config.rope_parameters`, or its part for the layers of one type; `factors` (from a GGUF
    file) divide the frequencies. `is_partial`: whether the architecture may rotate only a part of
    each head."""
    parameters = config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    kind = parameters.get("rope_type", "default")
    check_rope_type(kind)
    rotated = parameters.get("partial_rotary_factor", 1.0)
    if rotated != 1.0 and not is_partial:
        raise ModelError(
            f"the model rotates only a part ({rotated}) of each head, which models of its "
            "architecture don't. Check its config.json."
        )
    dim = int(head_dim * rotated)
    if dim % 2:
        raise ModelError(
            f"the model's partial_rotary_factor is {rotated} and its head_dim {head_dim}, so "
            f"that it rotates {dim} dimensions of each head; they are rotated in pairs, so it "
            "must be an even number. Check its config.json."
        )
    if layer_type is not None:
        # Transformers looks for it beside the types of layers, not within them.
        parameters = {**parameters, "truncate": config.rope_parameters.get("truncate", True)}
    try:
        frequencies, scaling = SCALINGS[kind](parameters, dim, config.max_position_embeddings)
        above = long_frequencies(parameters, dim) if kind == "longrope" else torch.empty(0)
    except KeyError as error:
        raise ModelError(
            f"the model's rope_parameters ({parameters}) have type {kind!r} but lack {error}; "
            "complete them in its config.json."
        ) from error
    except (ArithmeticError, TypeError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"the model's rope_parameters ({parameters}) can't be computed ({error}); correct "
            "them in its config.json."
        ) from error
    if factors is not None:
        if len(factors) != len(frequencies):
            raise ModelError(
                f"the file has {len(factors)} factors for the rotary frequencies of heads with "
                f"{head_dim} dimensions, which have {len(frequencies)}; convert the model again."
            )
        frequencies = frequencies / torch.tensor(factors, dtype=torch.float)
    both = torch.cat((frequencies, above))
    if not bool(torch.isfinite(both).all()) or not math.isfinite(scaling):
        raise ModelError(
            f"the model's rope_parameters ({parameters}) give frequencies that are not finite; "
            "correct them in its config.json."
        )
    if kind != "longrope":
        return RopeSpec(tuple(frequencies.tolist()), float(scaling))
    return RopeSpec(
        tuple(frequencies.tolist()),
        float(scaling),
        tuple(above.tolist()),
        parameters["original_max_position_embeddings"],
    )
