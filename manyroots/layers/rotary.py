"""Rotary position embedding.

`rope_frequencies` takes a transformers config and gives plain numbers, once, at load.
`Rotary` takes positions and gives this step's `Rotation`, once per step; the rotation turns
queries and keys in each layer. Knows nothing of pages or models.

No table over all positions is kept: the angles of one step are few and cheap, and a table for a
context of 128k tokens would take 64 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from manyroots.errors import ModelError

SUPPORTED_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose angles depend on the position alone. The others (dynamic, longrope) change with
the length of the sequence, so keys cached at one length would be wrong at another."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """RopeTable per position, and what the cosines and sines are multiplied with."""

    frequencies: tuple[float, ...]
    attention_scaling: float


def check_rope_type(kind: str) -> None:
    """Raise ModelError for a type of rotary scaling that is not served."""
    if kind not in SUPPORTED_TYPES:
        raise ModelError(
            f"the model uses rotary scaling of type {kind!r}; this version serves "
            f"{', '.join(SUPPORTED_TYPES)}. Choose a checkpoint with one of these."
        )


def rope_frequencies(
    config: Any, head_dim: int, factors: Sequence[float] | None = None
) -> RopeSpec:
    """Read `config.rope_parameters`; `factors` (a GGUF's own) divide the frequencies."""
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    check_rope_type(kind)
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"the model rotates only a part ({parameters['partial_rotary_factor']}) of each head; "
            "this version serves models that rotate whole heads."
        )
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        frequencies, scaling = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    else:
        try:
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
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
    if not bool(torch.isfinite(frequencies).all()) or not math.isfinite(scaling):
        raise ModelError(
            f"the model's rope_parameters ({parameters}) give frequencies that are not finite; "
            "correct them in its config.json."
        )
    return RopeSpec(tuple(frequencies.tolist()), float(scaling))


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of one step's tokens."""

    cos: Tensor
    """[num_tokens, 1, head_dim]; both halves are the same."""
    sin: Tensor
    """[num_tokens, 1, head_dim / 2]"""

    def __call__(self, x: Tensor) -> Tensor:
        """Turn x [num_tokens, heads, head_dim]; its halves are the two coordinates."""
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        turned = x * self.cos
        turned[..., :half].addcmul_(second, self.sin, value=-1)
        turned[..., half:].addcmul_(first, self.sin)
        return turned


class Rotary:
    """RopeTable for any positions."""

    def __init__(self, spec: RopeSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = torch.tensor(spec.frequencies, dtype=torch.float32, device=device)
        self._scaling = spec.attention_scaling
        self._dtype = dtype

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of tokens at `positions` [num_tokens]."""
        # float32 whatever the model's dtype: bfloat16 can't tell position 257 from 256.
        angles = (positions[:, None].float() * self._frequencies)[:, None, :]
        cos = (angles.cos() * self._scaling).to(self._dtype)
        sin = (angles.sin() * self._scaling).to(self._dtype)
        return Rotation(torch.cat((cos, cos), dim=-1), sin)
