"""What a config says of quantized weights, and which of that can be served.

Takes a config and what the user asks for; gives how products' weights are kept. Three kinds of FP8
checkpoints: transformers' own `fp8` (scales of blocks or of a tensor), `fbgemm_fp8` (of rows), and
`compressed-tensors` (of a tensor, of rows or of blocks). `mxfp4` is gpt-oss' own, of experts alone.
Activations are rounded where a GPU computes with them, by their own largest numbers, so what a
config says of them is of no account.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyroots.errors import ConfigError, ModelError
from manyroots.kernels.blocks import can_multiply_blocks, pack_blocks
from manyroots.kernels.fp8_rows import Fp8Form, in_fp8
from manyroots.layers.weights.formats import Fp8Format, Mxfp4Format, WeightFormat
from manyroots.models.fields import shown
from manyroots.models.source import ModelSource, SourceKind

FP8 = "fp8"
W4A8 = "w4a8"
MXFP4 = "mxfp4"
_OF_MXFP4 = "gpt_oss"
"""The one type of model that is published in it."""
MXFP4_ITEMSIZE = 17 / 32
"""Half a byte, and a byte for 32 numbers."""
FP8_CAPABILITY = (8, 9)
"""Of the first GPUs whose instructions know FP8."""


def weight_format(config: Any, asked: str = "auto") -> WeightFormat | None:
    """`asked` is --quantization; None: numbers in the model's dtype."""
    said = quantization_of(config)
    stored = None if said is None else _stored(said, config)
    if asked in ("auto", W4A8):
        return stored
    wanted: WeightFormat = (Mxfp4Format if asked == MXFP4 else Fp8Format)(is_stored=False)
    if said is not None:
        if type(stored) is type(wanted):
            return stored
        raise ConfigError(
            f"--quantization is {asked!r}, and the checkpoint is quantized already "
            f"({said.get('quant_method')}); leave the flag out."
        )
    if asked == MXFP4 and config.model_type != _OF_MXFP4:
        raise ConfigError(
            f"--quantization is {MXFP4!r}, which is for the experts of gpt-oss, and the model is "
            f"{config.model_type!r}; leave the flag out, or choose {FP8!r}."
        )
    return wanted


def format_on(device: torch.device, config: Any, asked: str) -> WeightFormat | None:
    """What `weight_format` says, unless the device multiplies other numbers faster: no CPU has
    operators for MXFP4, so experts are kept in it there if that was asked for."""
    kept = weight_format(config, asked)
    is_slow = device.type == "cpu" and asked != MXFP4
    return None if is_slow and isinstance(kept, Mxfp4Format) else kept


def itemsizes_on(
    device: torch.device, config: Any, asked: str, dtype: torch.dtype
) -> tuple[int, float]:
    """Bytes of a number of the layers' products, and of experts'."""
    kept = format_on(device, config, asked)
    itemsize = 1 if isinstance(kept, Fp8Format) else dtype.itemsize
    return itemsize, MXFP4_ITEMSIZE if isinstance(kept, Mxfp4Format) else itemsize


def keeps_blocks(asked: str, source: ModelSource, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether 4-bit weights are multiplied as they are; `asked` is --quantization."""
    if asked != W4A8:
        return False
    if source.kind is not SourceKind.GGUF:
        raise ConfigError(
            f"--quantization is {W4A8!r}, which multiplies the 4-bit blocks of a GGUF file as they "
            f"are, and {source.name} is none; leave the flag out."
        )
    if not can_multiply_blocks(device, dtype):
        raise ConfigError(
            f"--quantization is {W4A8!r}, for which torch has a fast operator on Arm CPUs with "
            f"KleidiAI and --dtype float32 alone, not on this {device.type} in {dtype}; leave the "
            "flag out."
        )
    return True


def check_device(device: torch.device, *, has_fp8_weights: bool, has_fp8_pages: bool) -> None:
    """Refuse FP8 where a GPU has no instructions for it."""
    if device.type != "cuda" or not (has_fp8_weights or has_fp8_pages):
        return
    capability = torch.cuda.get_device_capability(device)
    if capability >= FP8_CAPABILITY:
        return
    what, remedy = (
        ("FP8 weights need", "Serve an unquantized checkpoint, and leave --quantization out")
        if has_fp8_weights
        else ("--kv-cache-dtype fp8 needs", "Leave it out")
    )
    raise ConfigError(
        f"{what} a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell); "
        f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}. {remedy}."
    )


def product_of_blocks(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    """What computes x W^T + b [..., k] from 4-bit blocks; None where the weight has none."""
    matrix = pack_blocks(weight)
    if matrix is None:
        return None
    blocks = matrix

    def product(x: Tensor) -> Tensor:
        return blocks.times(x.reshape(-1, x.shape[-1]), bias).view(*x.shape[:-1], -1)

    return product


def as_in_prompts(x: Tensor) -> Tensor:
    """Activations [..., k] as products of many rows with FP8 weights take them on a GPU."""
    return _rounded(x, Fp8Form(1, x.shape[-1]))


def as_in_decodes(x: Tensor) -> Tensor:
    """The same as products of few rows take them."""
    return _rounded(x, Fp8Form(2, None))


def _rounded(x: Tensor, form: Fp8Form) -> Tensor:
    rows = in_fp8(x.reshape(-1, x.shape[-1]), form)
    return rows.plain().to(x.dtype).view(x.shape)


def quantization_of(config: Any) -> dict[str, Any] | None:
    """The config's own words."""
    said = getattr(config, "quantization_config", None)
    if said is None or isinstance(said, dict):
        return said
    words: dict[str, Any] = said.to_dict()
    return words


def _stored(said: dict[str, Any], config: Any) -> WeightFormat:
    method: Any = said.get("quant_method")
    method = getattr(method, "value", method)
    if method == "fp8" and said.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn"):
        return Fp8Format(is_stored=True, block=_block(said.get("weight_block_size")))
    if method == "fbgemm_fp8":
        return Fp8Format(is_stored=True)
    if method == "compressed-tensors":
        return _compressed(said)
    if method == MXFP4 and config.model_type == _OF_MXFP4:
        return Mxfp4Format(is_stored=True)
    raise ModelError(
        f"the checkpoint is quantized (method {method or 'unknown'!r}); this version loads FP8 "
        "(E4M3), gpt-oss' mxfp4, GGUF files and unquantized safetensors. Use one of these for this "
        "model, or save it unquantized with transformers."
    )


_CHANGES_PRODUCTS = ("transform_config", "sparsity_config")
"""Of compressed-tensors: weights that were turned, whose inputs must be, too; or left out."""


def _compressed(said: dict[str, Any]) -> Fp8Format:
    """All groups of layers must have the same kind of FP8 weights."""
    for name in _CHANGES_PRODUCTS:
        value = said.get(name)
        if value and value != {"format": "dense"}:
            raise ModelError(
                f"the checkpoint is quantized (compressed-tensors) with a {name} ({shown(value)}), "
                "which this version does not compute. Use a checkpoint without it."
            )
    kinds = set()
    for group in (said.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        is_fp8 = weights.get("num_bits") == 8 and weights.get("type") == "float"
        strategy, block = weights.get("strategy"), weights.get("block_structure")
        if not is_fp8 or strategy not in ("tensor", "channel", "block"):
            raise ModelError(
                "the checkpoint is quantized (compressed-tensors) with weights of "
                f"{weights.get('num_bits')} bits, type {weights.get('type')!r}, strategy "
                f"{strategy!r}; this version reads FP8 by tensor, channel or block. Use such a "
                "checkpoint, or an unquantized one."
            )
        kinds.add(tuple(block) if strategy == "block" and block else None)
    if len(kinds) != 1:
        raise ModelError(
            "the checkpoint is quantized (compressed-tensors) in several ways at once, or in none "
            "that its config names; use one that has a single group."
        )
    return Fp8Format(is_stored=True, block=_block(kinds.pop()))


def _block(sizes: Any) -> tuple[int, int] | None:
    if sizes is None:
        return None
    is_pair = isinstance(sizes, list | tuple) and len(sizes) == 2
    if not is_pair or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ModelError(
            f"the checkpoint's blocks of weights are {sizes!r}; they must be two sizes above 0. "
            "Correct its config.json."
        )
    return sizes[0], sizes[1]
