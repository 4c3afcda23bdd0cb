"""Single layers against transformers' versions of them."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from manyroots.errors import ModelError
from manyroots.kernels.choice import kernels_for
from manyroots.kernels.qk_rope_kv_write.inputs import RopeTable, SlotMapping
from manyroots.kernels.tolerances import assert_close
from manyroots.layers.linear import Linear
from manyroots.layers.norm import RMSNorm
from manyroots.layers.rotary import rope_frequencies
from manyroots.layers.step import Step
from tests.unit.layers.contexts import cpu_context
from tests.unit.models.tiny import LINEAR, LLAMA3, YARN, tiny_config

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "parameters", [DEFAULT, LINEAR, LLAMA3, YARN], ids=lambda p: p["rope_type"]
)
def test_rotary_equals_transformers(parameters: dict[str, object], dtype: torch.dtype) -> None:
    config = tiny_config(rope_parameters=dict(parameters))
    positions = torch.tensor([0, 1, 5, 255, 31, 32])
    x = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    rope = rope_frequencies(config, 8)
    table = RopeTable.at(torch.arange(256), torch.tensor(rope.frequencies), rope.attention_scaling)
    kernels = kernels_for(CPU).qk_rope_kv_write
    layer_kv = torch.zeros(1, 2, 8, 1, 8, dtype=dtype)
    slot_mapping = SlotMapping(torch.zeros(6, dtype=torch.int64), torch.arange(6))
    qkv = torch.cat((x, x[:, :2]), dim=1).flatten(1)
    rows = kernels.look_up(table, positions, dtype)
    ours = kernels.qk_rope_kv_write(qkv, rows, None, layer_kv, slot_mapping)
    assert torch.equal(layer_kv[0, 0, :6, 0], ours[:, 0])
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    theirs, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    assert_close("rotary", ours, theirs[0].transpose(0, 1), dtype)


def test_rotary_parameters_that_lack_a_value_are_refused() -> None:
    config = tiny_config()
    config.rope_parameters = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}
    with pytest.raises(ModelError, match=r"'llama3' but lack"):
        rope_frequencies(config, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_equals_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    theirs = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    theirs.weight.data.normal_(1.0, 0.2)
    ours = RMSNorm(48, cpu_context(48, dtype, eps=1e-5))
    ours.weight.copy_(theirs.weight.data)
    x = torch.randn(5, 48).to(dtype) * 3
    with torch.no_grad():
        assert_close("norm", ours.first(x), theirs(x), dtype)


def test_the_parts_of_a_fused_weight_are_views_that_cover_it() -> None:
    fused = Linear(4, {"q": 6, "k": 2}, cpu_context(4), bias=True, side=None)
    fills = dict(fused.weights("attn"))
    assert list(fills) == ["attn.q.weight", "attn.q.bias", "attn.k.weight", "attn.k.bias"]
    for value, fill in enumerate(fills.values()):
        fill.place.fill_(value)
    assert fused.weight.data[:, 0].tolist() == [0.0] * 6 + [2.0] * 2
    assert fused.bias is not None
    assert fused.bias.tolist() == [1.0] * 6 + [3.0] * 2
    assert fused(torch.zeros(3, 4), Step(ropes=(), memories=(), lora=None)).sums.shape == (
        3,
        8,
    )
