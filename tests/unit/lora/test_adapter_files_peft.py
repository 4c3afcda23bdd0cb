"""Adapters that PEFT itself saved read back as the tensors and scalings that PEFT computes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from manyroots.errors import AdapterError
from manyroots.kernels.tolerances import assert_close
from manyroots.lora.targets import TargetKind
from manyroots.store.adapter_files import read_adapter
from manyroots.store.adapter_weights import AdapterWeights
from tests.helpers.adapter_folders import tiny_targets

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

ALL_MODULES = [
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    "embed_tokens", "lm_head",
]  # fmt: skip
TARGETS = tiny_targets()
NUM_EXPERTS = 3


def llama(*, tied: bool = False) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
    )


def saved(model: Any, folder: Path, **options: Any) -> Any:
    """A PEFT model with random weights in both halves, saved to `folder`."""
    config = peft.LoraConfig(init_lora_weights=False, **options)
    wrapped = peft.get_peft_model(model, config)
    wrapped.save_pretrained(folder)
    return wrapped


def read(folder: Path, targets: Any = TARGETS) -> AdapterWeights:
    _, weights = read_adapter(folder, targets, max_rank=64, dtype=torch.float32, vocab_size=64)
    return weights


def check_same(weights: AdapterWeights, wrapped: Any) -> None:
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in wrapped.named_modules()
        if hasattr(module, "lora_A") and "default" in module.scaling
    }
    assert set(weights.pairs) == set(layers)
    for name, pair in weights.pairs.items():
        layer = layers[name]
        if TARGETS[name].kind is TargetKind.EMBEDDING:
            a, b = layer.lora_embedding_A["default"].T, layer.lora_embedding_B["default"]
        else:
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        assert torch.equal(pair.a, a), name
        assert torch.equal(pair.b, b), name
        assert pair.scaling == layer.scaling["default"], name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rank", [1, 7, 64])
def test_w14_every_module_reads_as_peft_saved_it(tmp_path: Path, tied: bool, rank: int) -> None:
    """W14: both spellings, with the base weights that PEFT puts beside embeddings."""
    wrapped = saved(
        llama(tied=tied), tmp_path, r=rank, lora_alpha=rank * 2, target_modules=ALL_MODULES
    )
    check_same(read(tmp_path), wrapped)


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        # Keys in alphabetical order, in which PEFT saves them: the first that matches counts.
        {"rank_pattern": {"down_proj": 5, "layers.1.self_attn.q_proj": 3, "q_proj": 2}},
        {"alpha_pattern": {"^model.layers.0.mlp.up_proj": 32, "v_proj": 1}},
        {"rank_pattern": {r".*\.up_proj": 9, r"model.layers.[01].self_attn.(q|k)_proj": 2}},
        {"rank_pattern": {r"layers\.\d+\.mlp.*": 6}, "alpha_pattern": {r"self_attn\..*": 3}},
        {"rank_pattern": {"k.proj": 6, "q_proj": 2}, "alpha_pattern": {"mlp.up.proj": 5}},
        {"rank_pattern": {r"(layers\.1.*)+_proj": 3, "k_proj": 6}},
        {"rank_pattern": {"o_proj": 2}, "alpha_pattern": {"o_proj": 11}, "use_rslora": True},
    ],
)
def test_w13_ranks_and_scalings_of_each_module_are_pefts(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """W13: rsLoRA, rank_pattern, alpha_pattern with PEFT's rules of matching."""
    wrapped = saved(llama(), tmp_path, r=4, lora_alpha=8, target_modules=ALL_MODULES[:7], **options)
    weights = read(tmp_path)
    check_same(weights, wrapped)


def test_an_alora_has_its_invocation_tokens(tmp_path: Path) -> None:
    saved(
        llama(), tmp_path, target_modules=["q_proj"], alora_invocation_tokens=[5, 9, 63],
        task_type="CAUSAL_LM",
    )  # fmt: skip
    spec, _ = read_adapter(tmp_path, TARGETS, max_rank=64, dtype=torch.float32, vocab_size=64)
    assert spec.invocation_tokens == (5, 9, 63)


def qwen3_moe(inner: int) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
    )
    torch.manual_seed(1)
    return Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize(
    "options",
    [
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
        {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
        {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
        {
            "target_modules": [],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "rank_pattern": {"experts.down_proj": 2},
        },
        {
            "target_modules": [],
            "target_parameters": ["mlp.experts.down_proj"],
            "alpha_pattern": {"mlp.gate.weight": 2},
        },
    ],
)
@pytest.mark.parametrize("inner", [24, 16])
def test_w15_parameters_of_experts_read_as_the_factors_peft_computes_with(
    tmp_path: Path, options: dict[str, Any], inner: int
) -> None:
    """W15: PEFT's flat format, expert by expert. With 16, gate and up together are square."""
    wrapped = saved(qwen3_moe(inner), tmp_path, r=4, lora_alpha=8, **options)
    weights = read(tmp_path, tiny_targets(num_experts=NUM_EXPERTS, intermediate=inner))
    num_compared = 0
    for name, module in wrapped.named_modules():
        if type(module).__name__ != "ParamWrapper":
            continue
        b, a, scaling = module.get_delta_factors("default")
        experts = name.removeprefix("base_model.model.").replace(".base_layer", "")
        parts = {"down_proj": b}
        if module.parameter_name == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), b.chunk(2, dim=1), strict=True))
        for part, wanted in parts.items():
            pair = weights.pairs[f"{experts}.{part}"]
            assert torch.equal(pair.a, a)
            assert torch.equal(pair.b, wanted)
            assert pair.scaling == scaling
            num_compared += 1
    assert num_compared == sum("experts" in name for name in weights.pairs) > 0


def test_w12_a_square_parameter_alone_is_refused(tmp_path: Path) -> None:
    """W12: with hidden = 2 * intermediate nothing tells which way PEFT read gate and up, if the
    adapter has no down beside them."""
    only = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}
    saved(qwen3_moe(16), tmp_path, r=4, **only)
    with pytest.raises(AdapterError, match="fit more than one reading"):
        read(tmp_path, tiny_targets(num_experts=NUM_EXPERTS, intermediate=16))


@pytest.mark.parametrize("inner", [32, 24])
@pytest.mark.parametrize(
    "parameters",
    [
        ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.router.weight"],
        ["mlp.experts.down_proj"],
        ["mlp.experts.gate_up_proj"],
    ],
)
def test_w15_gates_and_ups_by_turns_read_as_what_peft_adds_to_each(
    tmp_path: Path, parameters: list[str], inner: int
) -> None:
    """W15: gpt-oss, whose down is square (or not), and whose router is a parameter, too."""
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
    )
    torch.manual_seed(1)
    wrapped = saved(
        GptOssForCausalLM(config), tmp_path, r=4, lora_alpha=8, target_modules=["q_proj"],
        target_parameters=parameters,
        rank_pattern={"router.weight": 2} if "mlp.router.weight" in parameters else {},
    )  # fmt: skip
    made = tiny_targets(num_experts=NUM_EXPERTS, intermediate=inner, is_interleaved=True)
    targets = {name.replace("mlp.gate", "mlp.router"): target for name, target in made.items()}
    weights = read(tmp_path, targets)
    num_compared = 0
    for name, module in wrapped.named_modules():
        if type(module).__name__ != "ParamWrapper":
            continue
        block = name.removeprefix("base_model.model.").replace(".base_layer", "")
        delta = module.get_delta_weight("default")
        # A parameter is [in, out] for each expert.
        parts = {block: delta} if block.endswith("router") else {f"{block}.down_proj": delta.mT}
        if module.parameter_name == "gate_up_proj":
            parts = {
                f"{block}.gate_proj": delta[..., ::2].mT,
                f"{block}.up_proj": delta[..., 1::2].mT,
            }
        for target, wanted in parts.items():
            pair = weights.pairs[target]
            assert_close("lora", pair.scaling * pair.b @ pair.a, wanted, torch.float32)
            num_compared += 1
    assert num_compared == sum("mlp" in name for name in weights.pairs) > 0
