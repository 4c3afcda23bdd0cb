"""Rotary frequencies that are scaled for contexts longer than those of training.

Each function takes `rope_parameters`, the number of rotated dimensions of a head and the model's
longest context. It gives the frequencies, and a factor for cosines and sines. The arithmetic equals
transformers' to the last bit (`tests/unit/models/test_configs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Parameters = Mapping[str, Any]
Scaled = tuple[Tensor, float]


def plain(parameters: Parameters, dim: int) -> Tensor:
    """Frequencies without scaling."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float) / dim
    frequencies: Tensor = 1.0 / (parameters["rope_theta"] ** exponents)
    return frequencies


def _default(parameters: Parameters, dim: int, max_positions: int) -> Scaled:
    return plain(parameters, dim), 1.0


def _linear(parameters: Parameters, dim: int, max_positions: int) -> Scaled:
    return plain(parameters, dim) / parameters["factor"], 1.0


def _llama3(parameters: Parameters, dim: int, max_positions: int) -> Scaled:
    """Scales low frequencies, keeps high ones, and interpolates in between."""
    frequencies = plain(parameters, dim)
    factor, low = parameters["factor"], parameters["low_freq_factor"]
    high, length = parameters["high_freq_factor"], parameters["original_max_position_embeddings"]
    waves = 2 * math.pi / frequencies
    is_slow, is_fast = waves > length / low, waves < length / high
    slowed = torch.where(is_slow, frequencies / factor, frequencies)
    share = (length / waves - low) / (high - low)
    ramp = (1 - share) * slowed / factor + share * slowed
    return torch.where(~is_fast * ~is_slow, ramp, slowed), 1.0


def _yarn(parameters: Parameters, dim: int, max_positions: int) -> Scaled:
    """Interpolates between the dimensions that rotate a given number of times within the original
    length."""
    base, factor = parameters["rope_theta"], parameters["factor"]
    length = parameters["original_max_position_embeddings"]
    if factor is None:
        factor = max_positions / length
    fast, slow = parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1
    low, high = (
        (dim * math.log(length / (turns * 2 * math.pi))) / (2 * math.log(base))
        for turns in (fast, slow)
    )
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    turns = base ** (torch.arange(0, dim, 2).to(torch.float) / dim)
    kept = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float) - low) / (high - low), 0, 1)
    frequencies = 1.0 / (factor * turns) * (1 - kept) + 1.0 / turns * kept
    return frequencies, _yarn_attention(parameters, factor)


def _yarn_attention(parameters: Parameters, factor: float) -> float:
    own = parameters.get("attention_factor")
    if own is not None:
        return float(own)

    def scale(by: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale()


def _longrope(parameters: Parameters, dim: int, max_positions: int) -> Scaled:
    """Frequencies for contexts up to the original length; see `long_frequencies`."""
    length, factor = parameters["original_max_position_embeddings"], parameters.get("factor")
    if factor is None:
        factor = max_positions / length
    scaling = parameters.get("attention_factor")
    if scaling is None:
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    return _divided(parameters, dim, "short_factor"), float(scaling)


def long_frequencies(parameters: Parameters, dim: int) -> Tensor:
    """Longrope's frequencies for contexts beyond the original length."""
    return _divided(parameters, dim, "long_factor")


def _divided(parameters: Parameters, dim: int, name: str) -> Tensor:
    factors = torch.tensor(parameters[name], dtype=torch.float32)
    if len(factors) != dim // 2:
        raise ValueError(f"{name} has {len(factors)} numbers for {dim // 2} frequencies")
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies: Tensor = 1.0 / (factors * parameters["rope_theta"] ** exponents)
    return frequencies


SCALINGS: dict[str, Callable[[Parameters, int, int], Scaled]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""By `rope_type`."""
