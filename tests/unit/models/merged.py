"""Adapters merged into a transformers model: what their logits must be, by plain dense weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.helpers.adapter_folders import Pair


@torch.no_grad()
def merged(model: Any, pairs: Mapping[str, Pair]) -> Any:
    """A copy of `model` in which every weight W is W + scaling * B A, expert by expert."""
    changed = copy.deepcopy(model)
    modules = dict(changed.named_modules())
    for name, pair in pairs.items():
        folder, _, leaf = name.rpartition(".")
        if folder.endswith(".experts"):
            _add_to_experts(modules[folder], leaf, pair)
        elif leaf == "embed_tokens":
            modules[name].weight += pair.scaling * (pair.a @ pair.b.T)
        else:
            modules[name].weight += pair.scaling * (pair.b @ pair.a)
    return changed


def _add_to_experts(experts: Any, leaf: str, pair: Pair) -> None:
    for expert in range(experts.num_experts):
        a, b = _of(pair.a, expert), _of(pair.b, expert)
        weight = experts.down_proj[expert]
        if leaf != "down_proj":
            gate, up = experts.gate_up_proj[expert].chunk(2, dim=0)
            weight = gate if leaf == "gate_proj" else up
        weight += pair.scaling * (b @ a)


def _of(stack: Tensor, expert: int) -> Tensor:
    return stack[0] if stack.shape[0] == 1 else stack[expert]
