"""Tensors of an adapter in training become files in memory, and training goes on at once."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from manyroots.engine.adapter_tensors import memory_adapter


def test_a05_a_published_adapter_keeps_its_bytes_while_training_changes_them(
    tmp_path: Path,
) -> None:
    """More bytes than one thread copies; a strided tensor; three dtypes of odd sizes."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"layer.{number}.lora_A.weight": torch.randn(3, 50_001, generator=generator).to(dtype)
        for number in range(9)
        for dtype in [(torch.bfloat16, torch.float32, torch.float16)[number % 3]]
    }
    tensors["layer.9.lora_B.weight"] = torch.randn(64, 33, generator=generator).t()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    adapter = memory_adapter(tensors, {"r": 3})
    for tensor in tensors.values():
        tensor.zero_()
    adapter.weights.write(tmp_path)
    adapter.config.write(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text()) == {"r": 3}
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert found.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(found[name], tensor), name
