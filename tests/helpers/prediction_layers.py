"""Adds a prediction layer (MTP) to a tiny checkpoint, by the names of published ones.

The layer is a copy of the model's last layer with attention, with other numbers. With `is_right`
the model's layers add little to a token's embedding, which the layer reads. Then the model often
continues as the layer guesses.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NUMBERED = {
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}  # fmt: skip


def add_prediction(
    folder: Path, *, is_right: bool = False, quiet: float = 0.002, seed: int = 1
) -> dict[str, Tensor]:
    """Write the layer's weights beside the model's; gives them by their names within it. `quiet`:
    the share that remains of what the model's layers add, with `is_right`."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    rng = torch.Generator().manual_seed(seed)
    numbers = {int(n.split(".")[2]) for n in tensors if n.startswith("model.layers.")}
    like = max(n for n in numbers if any(f"layers.{n}.self_attn." in name for name in tensors))
    prefix = f"model.layers.{like}."
    layer = {
        name.removeprefix(prefix): tensor for name, tensor in tensors.items()
        if name.startswith(prefix)
    }  # fmt: skip
    is_numbered = not any("linear_attn" in name for name in tensors)
    hidden = tensors["model.norm.weight"].shape[0]

    def numbers_like(tensor: Tensor, spread: float) -> Tensor:
        return tensor + spread * torch.randn(tensor.shape, generator=rng).to(tensor.dtype)

    norm = tensors["model.norm.weight"]
    own = {f"layers.0.{name}": numbers_like(tensor, 0.02) for name, tensor in layer.items()}
    own["fc.weight"] = torch.randn(hidden, 2 * hidden, generator=rng) / hidden**0.5
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        own[f"{name}.weight"] = numbers_like(norm, 0.1)
    if is_right:
        # The model's layers and this one add little to the embedding, whose norm they read.
        neutral = torch.ones(hidden) if is_numbered else torch.zeros(hidden)
        own["fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
        own["pre_fc_norm_embedding.weight"] = neutral
        own["norm.weight"] = norm.clone()
        own = {name: _quieter(name, tensor, quiet) for name, tensor in own.items()}
        tensors = {name: _quieter(name, tensor, quiet) for name, tensor in tensors.items()}
    save_file({**tensors, **{_name(n, is_numbered, max(numbers) + 1): t for n, t in own.items()}},
              file, metadata={"format": "pt"})  # fmt: skip
    return own


def _quieter(name: str, tensor: Tensor, share: float) -> Tensor:
    ends = ("o_proj.weight", "down_proj.weight", "out_proj.weight", "down_proj")
    return tensor * share if name.endswith(ends) else tensor


def _name(name: str, is_numbered: bool, number: int) -> str:
    if not is_numbered:
        return f"mtp.{name}"
    part, _, rest = name.partition(".")
    inner = f"{NUMBERED[part]}.{rest}" if part in NUMBERED else name.removeprefix("layers.0.")
    return f"model.layers.{number}.{inner}"
