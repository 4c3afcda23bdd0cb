"""INT8 weights of compressed-tensors checkpoints (W8A16): read, kept, multiplied, with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.kernels.triton_cases import DEVICE, DTYPES, make_rows, make_site, randn

from manyroots.errors import ModelError  # isort: skip
from manyroots.ids import AdapterSlot  # isort: skip
from manyroots.kernels.choice import reference_kernels  # isort: skip
from manyroots.kernels.gemm import reference as gemm_reference  # isort: skip
from manyroots.kernels.gemm import triton as gemm  # isort: skip
from manyroots.kernels.scaled import Int8Matrix, quantize_rows_int8  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip
from manyroots.layers.weights.fill import FilledRows

from manyroots.layers.weights.int8 import Int8Format  # isort: skip
from manyroots.models.weight_bytes import weight_bytes  # isort: skip
from tests.unit.models.lockstep import LockstepShard, in_lockstep  # isort: skip
from tests.unit.models.paged import PagedModel  # isort: skip
from tests.unit.models.peft_models import ATTENTION, MLP, Pair, pool_for, read  # isort: skip
from tests.unit.models.test_fp8_loading import change, compressed, load, set_config  # isort: skip
from tests.unit.models.test_logits_parity import expected, prompts  # isort: skip
from tests.unit.models.test_peft_parity import prompt, run  # isort: skip
from tests.unit.models.tiny import save_tiny  # isort: skip

KINDS = {"pack-quantized": "weight_packed", "int-quantized": "weight"}
"""Their formats, and what each calls a weight."""


def by_channel(**more: Any) -> dict[str, Any]:
    own = {"type": "int", "symmetric": True, **more}
    return compressed(own.pop("strategy", "channel"), **own)


def packed(data: Tensor) -> Tensor:
    """Words of four columns, the first in the lowest bits, each plus 128."""
    words = torch.zeros(len(data), -(-data.shape[1] // 4), dtype=torch.int64)
    for column in range(data.shape[1]):
        words[:, column // 4] += (data[:, column].long() + 128) << (8 * (column % 4))
    return torch.where(words >= 2**31, words - 2**32, words).int()


def save_int8(folder: Path, model: str, kind: str, **changes: Any) -> Any:
    """A checkpoint of that kind; gives transformers' model with the numbers it stands for."""
    theirs = save_tiny(folder, model, **changes)
    tensors, numbers = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        data, scales = quantize_rows_int8(tensor)
        stem = name.removesuffix("weight")
        tensors[stem + KINDS[kind]] = packed(data) if kind == "pack-quantized" else data
        tensors[stem + "weight_scale"] = scales
        if kind == "pack-quantized":
            tensors[stem + "weight_shape"] = torch.tensor(data.shape)
        numbers[name] = data.float() * scales
    save_file(tensors, folder / "model.safetensors")
    set_config(folder, quantization_config={**by_channel(), "format": kind})
    own = theirs.state_dict()
    for name, tensor in own.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            stem = name.rpartition(".")[0]
            own[name] = torch.stack([
                torch.cat([numbers[f"{stem}.{expert}.{part}.weight"] for part in parts])
                for expert in range(len(tensor))
            ])  # fmt: skip
    theirs.load_state_dict({**own, **{n: t for n, t in numbers.items() if n in own}})
    return theirs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["llama", "qwen3-moe"])
def test_int8_checkpoints_give_the_logits_of_their_numbers(
    model: str, kind: str, tmp_path: Path
) -> None:
    """Dense products stay in INT8; experts are made numbers."""
    theirs = save_int8(tmp_path, model, kind)
    ours = load(tmp_path)
    assert isinstance(next(iter(ours.layers[0].products())).weight.data, Int8Matrix)
    got = PagedModel(ours).step(prompts())
    plain = PagedModel(load(tmp_path, kernels=reference_kernels())).step(prompts())
    for name, tokens in prompts().items():
        wanted = expected(theirs, tokens)
        assert_close("logits", got[name], wanted, torch.float32)
        assert_close("logits", plain[name], wanted, torch.float32)


def test_projections_that_an_int8_checkpoint_leaves_unquantized_stay_exact(
    tmp_path: Path,
) -> None:
    """Q01: the same seam as for FP8."""
    theirs = save_int8(tmp_path, "llama", "pack-quantized")
    numbers = theirs.state_dict()

    def leave(tensors: dict[str, Tensor]) -> None:
        for kind in ("weight_packed", "weight_scale", "weight_shape"):
            del tensors[f"{QUERY}.{kind}"]
        tensors[f"{QUERY}.weight"] = numbers[f"{QUERY}.weight"].clone()

    change(tmp_path, leave)
    ours = load(tmp_path)
    qkv, o = list(ours.layers[1].products())[:2]
    assert isinstance(qkv.weight.data, Tensor)
    assert isinstance(o.weight.data, Int8Matrix)
    got = PagedModel(ours).step(prompts())
    for name, tokens in prompts().items():
        assert_close("logits", got[name], expected(theirs, tokens), torch.float32)


def test_adapters_on_int8_weights_give_pefts_logits(tmp_path: Path) -> None:
    """Rows of two adapters and of the base model in one step."""
    base = save_int8(tmp_path, "llama", "pack-quantized")
    ours = load(tmp_path)
    slot_of, theirs = {"first": 0, "second": 1}, base
    for name, rank in (("first", 4), ("second", 9)):
        torch.manual_seed(rank)
        config = LoraConfig(
            task_type="CAUSAL_LM", init_lora_weights=False, r=rank, target_modules=ATTENTION + MLP
        )
        if theirs is base:
            theirs = get_peft_model(base, config, adapter_name=name)
        else:
            theirs.add_adapter(name, config)
    theirs.save_pretrained(tmp_path / "adapters")
    pool = pool_for(ours, num_slots=2)
    for name, slot in slot_of.items():
        pool.load(AdapterSlot(slot), read(tmp_path / "adapters" / name, ours)[1])
    pair = Pair(theirs.eval(), ours, pool, slot_of)
    run(
        pair,
        {
            "base": (None, prompt(1, 9)),
            "1": ("first", prompt(2, 12)),
            "2": ("second", prompt(3, 7)),
        },
        5,
    )


def test_two_ranks_with_int8_weights_give_one_ranks_logits(tmp_path: Path) -> None:
    save_int8(tmp_path, "llama", "pack-quantized")
    alone = PagedModel(load(tmp_path)).step(prompts())

    def rank(shard: LockstepShard) -> dict[str, Tensor]:
        return PagedModel(load(tmp_path, shard=shard)).step(prompts())

    results, _ = in_lockstep(2, rank)
    for result in results:
        for name, logits in alone.items():
            assert_close("logits", result[name], logits, torch.float32)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (by_channel(num_bits=4), "weights of 4 bits, type 'int'"),
        (by_channel(strategy="group"), "strategy 'group'"),
        (by_channel(symmetric=False), "symmetric False"),
    ],
)
def test_other_integers_are_refused_by_name(
    config: dict[str, Any], says: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path)
    set_config(tmp_path, quantization_config=config)
    with pytest.raises(ModelError, match=says):
        load(tmp_path)


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
        (lambda t: t.update({"lm_head.weight_scale": torch.ones(1)}), "scales of lm_head, and"),
    ],
)
def test_an_int8_checkpoint_that_is_not_whole_is_refused_by_name(
    edit: Any, says: str, tmp_path: Path
) -> None:
    save_int8(tmp_path, "llama", "int-quantized")
    change(tmp_path, edit)
    with pytest.raises(ModelError, match=says):
        load(tmp_path)


def test_int8_bytes_are_counted_and_made_up_weights_are_rounded(tmp_path: Path) -> None:
    save_int8(tmp_path, "llama", "int-quantized")
    model = load(tmp_path)
    counted = weight_bytes(model.spec, model.spec.vocab_size, torch.float32, Int8Format())
    weights = {n: f.place for n, f in model.weights().items() if not n.endswith("_scale")}
    norms = 3 * sum(place.numel() for name, place in weights.items() if "norm" in name)
    assert counted == sum(place.nbytes for place in weights.values()) - norms
    empty = Int8Format().matrix(6, 8, torch.float32, torch.device("cpu"))
    own = FilledRows("x", slice(None), None, model.shard, torch.float32)
    [(_, fill)] = Int8Format().fills(empty, own)
    numbers = randn(6, 8).cpu()
    fill.take(numbers)
    assert (fill.values - numbers).abs().max() <= numbers.abs().max() / 254 * 1.001


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 72, 256), (33, 40, 272)])
@pytest.mark.parametrize("splits", [1, 2])
def test_a_triton_product_with_int8_equals_the_reference(
    splits: int, rows: int, n: int, k: int, dtype: torch.dtype
) -> None:
    """With adapters, a bias and scales that differ widely."""
    data = torch.randint(-128, 128, (n, k), generator=torch.Generator().manual_seed(3))
    matrix = Int8Matrix(data.to(DEVICE, torch.int8), randn(n, 1, seed=5).exp() / (127 * k**0.5))
    x, bias = randn(rows, k, dtype=dtype), randn(n, seed=9).to(dtype)
    assert gemm.is_for(rows, matrix)
    assert not gemm.is_for(129, matrix)
    slots = [-1, *[0] * (rows - 1)]
    site, own = make_site(k, (n // 2, n - n // 2), [(8, 8)], dtype), make_rows(*slots)
    cut = gemm.Tiling(64, 64, splits, 2, 4)
    expected, _ = gemm_reference.linear(x, matrix, bias=bias)
    for adapters in ((None, None), (site, own)):
        out, _ = gemm.linear(x, matrix, *adapters, bias, tiling=cut)
        assert_close("lora", out.float().sum(0), expected[0], dtype)
