"""Q01, Q02: checkpoints with quantized weights, and weights that are rounded as they are loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from manyroots.config import ModelSettings
from manyroots.distributed.shard import WHOLE, Shard
from manyroots.errors import ConfigError, ModelError
from manyroots.kernels.choice import reference_kernels
from manyroots.kernels.scaled import LARGEST, ScaledMatrix, quantize_rows
from manyroots.kernels.tolerances import assert_close
from manyroots.layers.linear import Linear
from manyroots.layers.weights.fill import Fill
from manyroots.layers.weights.formats import PLAIN
from manyroots.layers.weights.fp8 import Fp8Format, check_gpu
from manyroots.models.decoder import Decoder
from manyroots.models.load import load_model, refill, rehearse
from manyroots.models.source import resolve_source
from manyroots.models.weight_bytes import weight_bytes
from tests.unit.models.lockstep import LockstepShard, in_lockstep
from tests.unit.models.paged import PagedModel
from tests.unit.models.test_logits_parity import expected, prompts
from tests.unit.models.tiny import save_tiny

BLOCK = (16, 16)
Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]


def by_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().max() / LARGEST
    return (weight / scale).to(torch.float8_e4m3fn), scale


def by_row(weight: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_rows(weight)


def by_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    data = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = slice(16 * i, 16 * i + 16), slice(16 * j, 16 * j + 16)
            data[here], scales[i, j] = by_tensor(weight[here])
    return data, scales


OTHER_METHODS = (
    "aqlm", "auto-round", "awq", "bitnet", "bitsandbytes", "eetq", "fpquant", "gptq", "higgs",
    "hqq", "modelopt", "quanto", "quark", "spqr", "torchao", "vptq",
)  # fmt: skip


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


KINDS: dict[str, tuple[Quantize, str, dict[str, Any]]] = {
    "fp8-tensor": (
        by_tensor, "weight_scale", {"quant_method": "fp8", "activation_scheme": "static"}
    ),
    "fp8-block": (
        by_block, "weight_scale_inv", {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    ),
    "fbgemm": (by_row, "weight_scale", {"quant_method": "fbgemm_fp8"}),
    "modelopt": (by_tensor, "weight_scale", {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "compressed-channel": (by_row, "weight_scale", compressed("channel")),
    "compressed-block": (by_block, "weight_scale", compressed("block", block_structure=[16, 16])),
}  # fmt: skip


PRODUCT = re.compile(r"layers\.\d+\..*(proj\w*|_linear|w[123])\.weight$")
"""Products of the layers, but for routers and gates."""


def save_quantized(folder: Path, model: str, kind: str, pattern: re.Pattern[str] = PRODUCT) -> Any:
    """A checkpoint of that kind, with the products whose names match; gives transformers' model
    with the same numbers."""
    theirs = save_tiny(folder, model)
    quantize, suffix, config = KINDS[kind]
    tensors, numbers = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not pattern.search(name):
            tensors[name] = numbers[name] = tensor
            continue
        data, scales = quantize(tensor)
        tensors[name] = data
        numbers[name] = rounded(tensor, quantize)
        tensors[f"{name.removesuffix('weight')}{suffix}"] = scales
        tensors[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(3.0)
    save_file(numbers, folder / "model.safetensors", {"format": "pt"})
    theirs = type(theirs).from_pretrained(folder, attn_implementation="eager").eval()
    save_file(tensors, folder / "model.safetensors")
    set_config(folder, quantization_config=config)
    return theirs


def rounded(weight: Tensor, quantize: Quantize) -> Tensor:
    data, scales = quantize(weight)
    if scales.numel() > 1 and scales.shape[-1] > 1:
        scales = scales.repeat_interleave(16, 0)[: len(weight)].repeat_interleave(16, 1)
        scales = scales[:, : weight.shape[1]]
    return data.float() * scales


def set_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def load(folder: Path, quantization: str = "auto", shard: Shard = WHOLE, **more: Any) -> Decoder:
    return load_model(
        resolve_source(ModelSettings(model=str(folder))), dtype=torch.float32,
        device=torch.device("cpu"), load_format="auto", seed=0, shard=shard,
        quantization=quantization, **more,
    )  # fmt: skip


def products_of(model: Decoder) -> list[Linear]:
    return [*(one for layer in model.layers for one in layer.products()), model.head.product]


def ranks_of(folder: Path) -> list[dict[str, Tensor]]:
    """The logits that each of two ranks gives."""

    def rank(shard: LockstepShard) -> dict[str, Tensor]:
        return PagedModel(load(folder, shard=shard)).step(prompts())

    return in_lockstep(2, rank)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["llama", "qwen3-moe"])
def test_q01_a_checkpoint_gives_the_logits_of_its_numbers(
    model: str, kind: str, tmp_path: Path
) -> None:
    """Q01: dense and experts, and fused projections keep a scale each."""
    theirs = save_quantized(tmp_path, model, kind)
    ours = load(tmp_path)
    products = list(ours.layers[0].products())
    assert isinstance(products[0].weight.data, ScaledMatrix)
    got = PagedModel(ours).step(prompts())
    for name, tokens in prompts().items():
        assert_close("logits", got[name], expected(theirs, tokens), torch.float32)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("qwen3-next", "fp8-block"),
        ("qwen3.5", "compressed-channel"),
        ("granite-h", "compressed-channel"),
        ("falcon-h1", "fp8-tensor"),
        ("lfm2", "compressed-block"),
    ],
)
def test_q01_numbers_of_products_that_are_kept_unquantized_are_read_exactly(
    model: str, kind: str, tmp_path: Path
) -> None:
    """Q01: the first products of recurrent mixers; and experts that are stacked with their
    scales."""
    theirs = save_quantized(tmp_path, model, kind)
    ours = load(tmp_path)
    kept = {isinstance(one.weight.data, ScaledMatrix) for one in ours.layers[0].products()}
    assert kept == ({True} if model == "lfm2" else {True, False})
    got = PagedModel(ours).step(prompts())
    for name, tokens in prompts().items():
        assert_close("logits", got[name], expected(theirs, tokens), torch.float32)


def test_q01_a_weight_and_its_scales_may_come_in_any_order() -> None:
    """Q01: for a product that is kept unquantized."""
    numbers = torch.randn(40, 24, generator=torch.Generator().manual_seed(3))
    data, scales = by_block(numbers)
    both = [("head.weight", data), ("head.weight_scale_inv", scales)]
    fills = {"head.weight": Fill(torch.empty(40, 24))}
    for order in (both, both[::-1]):
        [(name, got)] = Fp8Format(is_stored=True, block=BLOCK).read(order, fills)
        assert name == "head.weight"
        assert torch.equal(got, rounded(numbers, by_block))


def test_q01_a_head_and_routers_in_fp8_are_read_exactly(tmp_path: Path) -> None:
    """Q01: on two ranks."""
    every = re.compile(r"(layers.*(proj|gate)|lm_head)\.weight$")
    theirs = save_quantized(tmp_path, "qwen3-moe", "compressed-channel", every)
    for result in ranks_of(tmp_path):
        for name, tokens in prompts().items():
            assert_close("logits", result[name], expected(theirs, tokens), torch.float32)


QUANTIZED = re.compile(r"layers\.(1\.mlp\..*|2\..*(?<!k)_proj)\.weight$")
"""Products of a checkpoint that leaves the others unquantized: the first layer, the second's
attention, and the third's keys, which share a matrix with queries."""


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("fbgemm", {"modules_to_not_convert": ["layers.0", "layers.1.self_attn", "lm_head"]}),
        ("compressed-block", {"ignore": ["lm_head", "re:.*layers.0.*", "re:.*1.self_attn.*"]}),
    ],
)
def test_q01_projections_that_a_checkpoint_leaves_unquantized_stay_exact(
    kind: str, left: dict[str, Any], tmp_path: Path
) -> None:
    """Q01: on one rank and on two, where a config names them by module or by pattern."""
    theirs = save_quantized(tmp_path, "llama", kind, QUANTIZED)
    set_config(tmp_path, quantization_config={**KINDS[kind][2], **left})
    ours = load(tmp_path)
    kept = [isinstance(one.weight.data, ScaledMatrix) for one in products_of(ours)]
    first, second, third = [False] * 4, [False, False, True, True], [False, True, True, True]
    assert kept == [*first, *second, *third, False]
    fills = ours.weights()
    assert ours.num_bytes == sum(fill.place.nbytes for fill in fills.values())
    for name, numbers in theirs.state_dict().items():
        if fills[name].place.dtype is torch.float32:
            assert torch.equal(fills[name].place, numbers), name
    two = [] if kind == "compressed-block" else ranks_of(tmp_path)  # 40 columns cut a block
    for got in (PagedModel(ours).step(prompts()), *two):
        for name, tokens in prompts().items():
            assert_close("logits", got[name], expected(theirs, tokens), torch.float32)


def test_q01_experts_of_which_some_are_unquantized_are_all_kept_so(tmp_path: Path) -> None:
    """Q01: they share one matrix."""
    some = re.compile(r"layers\.(0\.mlp\.experts\.[0-6]\..*|2.*)_proj\.weight$")
    theirs = save_quantized(tmp_path, "qwen3-moe", "fp8-block", some)
    ours = load(tmp_path)
    stacks = [layer.feed_forward.experts.data for layer in ours.layers]
    assert [isinstance(one.gate_up, ScaledMatrix) for one in stacks] == [False, False, True]
    assert [isinstance(one.down, ScaledMatrix) for one in stacks] == [False, False, True]
    got = PagedModel(ours).step(prompts())
    for name, tokens in prompts().items():
        assert_close("logits", got[name], expected(theirs, tokens), torch.float32)


def test_g06_weights_are_updated_in_place_where_some_are_unquantized(tmp_path: Path) -> None:
    """G06: a projection that is served unquantized takes the numbers of FP8, not the other way."""
    part, whole = tmp_path / "part", tmp_path / "whole"
    save_quantized(part, "llama", "fbgemm", QUANTIZED)
    theirs = save_quantized(whole, "llama", "fbgemm")
    sources = [resolve_source(ModelSettings(model=str(folder))) for folder in (part, whole)]
    ours = load(part)
    for source in (*sources, sources[1]):
        rehearse(ours, source)
        refill(ours, source)
    got = PagedModel(ours).step(prompts())
    for name, tokens in prompts().items():
        assert_close("logits", got[name], expected(theirs, tokens), torch.float32)
    with pytest.raises(ModelError, match=r"weight is in torch.float32, .* have it in FP8"):
        rehearse(load(whole), sources[0])


@pytest.mark.parametrize("model", ["llama", "qwen3-moe"])
def test_q01_the_references_give_the_same_logits(model: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, model, "fp8-block")
    fast = PagedModel(load(tmp_path)).step(prompts())
    plain = PagedModel(load(tmp_path, kernels=reference_kernels())).step(prompts())
    for name, logits in plain.items():
        assert_close("logits", fast[name], logits, torch.float32)


@pytest.mark.parametrize("model", ["llama-biased", "qwen3-moe", "gemma3"])
def test_q01_weights_are_rounded_as_they_are_loaded_and_nothing_else_is(
    model: str, tmp_path: Path
) -> None:
    theirs = save_tiny(tmp_path, model)
    ours, plain = load(tmp_path, "fp8"), load(tmp_path)
    kept, whole = ours.weights(), plain.weights()
    for name, fill in kept.items():
        numbers = whole[name].place
        is_product = fill.place.dtype is torch.float8_e4m3fn
        assert is_product == name.endswith("_proj.weight"), name
        wanted = rounded(numbers, by_row) if is_product else numbers
        assert torch.equal(fill.values, wanted), name
    exact = PagedModel(plain).step(prompts())
    near = PagedModel(ours).step(prompts())
    assert theirs is not None
    for name, logits in exact.items():
        assert not torch.equal(near[name], logits)


@pytest.mark.parametrize("kind", ["fp8-block", "compressed-channel"])
def test_q01_two_ranks_give_one_ranks_logits(kind: str, tmp_path: Path) -> None:
    """Q01: 48 columns in blocks of 16: ranks' halves would cut a block."""
    save_quantized(tmp_path, "llama", kind)
    if kind == "fp8-block":
        with pytest.raises(ConfigError, match=r"24 columns of .*o_proj are no multiple of the 16"):
            in_lockstep(2, lambda shard: load(tmp_path, shard=shard).dtype)
        return
    alone = PagedModel(load(tmp_path)).step(prompts())
    for result in ranks_of(tmp_path):
        for name, logits in alone.items():
            assert_close("logits", result[name], logits, torch.float32)


def change(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


QUERY = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (
            lambda t: t.update({f"{QUERY}.weight": torch.zeros(48, 48)}),
            "scales of .*q_proj, and not a weight",
        ),
        (lambda t: t.pop(f"{QUERY}.weight_scale"), f"missing {QUERY}.weight_scale"),
        (lambda t: t.update({f"{QUERY}.weight_scale": torch.ones(7)}), r"has shape \[7\]"),
        (
            lambda t: t.update({"lm_head.weight_scale": torch.ones(1)}),
            "scales of lm_head, and not a weight of lm_head in FP8",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}),
            "a weight of lm_head in FP8, and not scales",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e5m2)}),
            "lm_head.weight .* is in torch.float8_e5m2: its weights are quantized",
        ),
        (
            lambda t: t.update({
                "lm_head.weight": torch.zeros(97, 40).to(torch.float8_e4m3fn),
                "lm_head.weight_scale": torch.ones(1),
            }),
            r"lm_head.weight .* has shape \[97, 40\], but its config implies \[97, 48\]",
        ),
    ],
)  # fmt: skip
def test_q01_a_checkpoint_that_is_not_whole_is_refused_by_name(
    edit: Callable[[dict[str, Tensor]], None], says: str, tmp_path: Path
) -> None:
    save_quantized(tmp_path, "llama", "fp8-tensor")
    change(tmp_path, edit)
    with pytest.raises(ModelError, match=says):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "awq"}, "'awq'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'fp8'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"\[128\]"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt', quant_algo 'NVFP4'"),
        (compressed("channel", num_bits=4), "4 bits"),
        (compressed("group"), "'group'"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "several ways"),
        ({**compressed("channel"), "transform_config": {"config_groups": {"R1": {}}}}, "transform"),
        ({**compressed("channel"), "sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
        *(({"quant_method": name}, name) for name in OTHER_METHODS),
    ],
)
def test_q01_other_kinds_are_refused_by_name(
    config: dict[str, Any], says: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path)
    set_config(tmp_path, quantization_config=config)
    with pytest.raises(ModelError, match=says):
        load(tmp_path)


def test_q01_older_checkpoints_of_modelopt_have_a_file_for_it(tmp_path: Path) -> None:
    """Q01: beside a config.json that does not mention it."""
    theirs = save_quantized(tmp_path, "llama", "modelopt")
    set_config(tmp_path, quantization_config=None)
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    file = tmp_path / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    got = PagedModel(load(tmp_path)).step(prompts())
    for name, tokens in prompts().items():
        assert_close("logits", got[name], expected(theirs, tokens), torch.float32)
    file.write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(ModelError, match=r"'modelopt', quant_algo 'NVFP4'.*loads FP8"):
        load(tmp_path)
    file.write_text("{}")
    with pytest.raises(ModelError, match=r"hf_quant_config\.json can't be used"):
        load(tmp_path)


def test_q01_bytes_are_counted_as_they_are_kept(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    model = load(tmp_path, "fp8")
    kept = Fp8Format(is_stored=False)
    counted = weight_bytes(model.spec, model.spec.vocab_size, torch.float32, kept)
    held = sum(fill.place.nbytes for fill in model.weights().values())
    norms = 3 * sum(f.place.numel() for n, f in model.weights().items() if "norm" in n)
    assert counted == held - norms


def test_g06_weights_are_updated_in_place_from_the_format_that_is_served(tmp_path: Path) -> None:
    """G06: FP8 from FP8; an unquantized model takes the numbers of FP8."""
    one, other, plain = tmp_path / "one", tmp_path / "other", tmp_path / "plain"
    save_quantized(one, "llama", "fbgemm")
    save_quantized(other, "llama", "fbgemm")
    change(other, lambda t: t.update({f"{QUERY}.weight_scale": t[f"{QUERY}.weight_scale"] * 2}))
    save_tiny(plain, "llama")
    model = load(one)
    before = model.weights()[f"{QUERY}.weight_scale"].place.clone()
    source = resolve_source(ModelSettings(model=str(other)))
    rehearse(model, source)
    refill(model, source)
    assert torch.equal(model.weights()[f"{QUERY}.weight_scale"].place, before * 2)
    with pytest.raises(ModelError, match=r"is unquantized, .* are FP8; give weights in FP8"):
        rehearse(model, resolve_source(ModelSettings(model=str(plain))))
    unquantized = load(plain)
    rehearse(unquantized, source)
    refill(unquantized, source)
    wanted = model.layers[1].mixers[0].qkv.weight.data.plain(torch.float32)
    assert torch.equal(unquantized.layers[1].mixers[0].qkv.weight.data, wanted)


def test_q04_scales_of_keys_and_values_are_refused_by_name_where_they_would_count(
    tmp_path: Path,
) -> None:
    """Pages in the model's dtype need none, and a scale of 1 changes nothing."""
    save_quantized(tmp_path, "llama", "fbgemm")
    path, name = tmp_path / "model.safetensors", "model.layers.1.self_attn.k_scale"
    tensors = load_file(path)
    save_file({**tensors, name: torch.tensor(1.0)}, path)
    load(tmp_path, kv_cache_dtype="fp8")
    save_file({**tensors, name: torch.tensor(0.25)}, path)
    load(tmp_path)
    with pytest.raises(ModelError, match=r"has model.layers.1.self_attn.k_scale of 0.25 .* Leave"):
        load(tmp_path, kv_cache_dtype="fp8")


def test_q01_a_gpu_without_instructions_of_fp8_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    cuda = torch.device("cuda")
    with pytest.raises(ConfigError, match=r"FP8 weights need .* 8.9 or later .*; A100 has 8.0"):
        Fp8Format().check(cuda)
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8 needs .* Leave it out"):
        check_gpu(cuda, "--kv-cache-dtype fp8 needs", "Leave it out")
    PLAIN.check(cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    Fp8Format().check(cuda)
