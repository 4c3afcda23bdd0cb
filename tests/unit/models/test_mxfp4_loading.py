"""Q02: gpt-oss' experts as they are published, in MXFP4: read exactly, and kept in 4 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from manyroots.config import ModelSettings
from manyroots.errors import ConfigError, ModelError
from manyroots.kernels.choice import reference_kernels
from manyroots.kernels.mxfp4 import Mxfp4Matrix
from manyroots.kernels.tolerances import assert_close
from manyroots.layers.moe import SparseMLP
from manyroots.layers.weights.formats import PLAIN
from manyroots.layers.weights.mxfp4 import Mxfp4Format, unpacked
from manyroots.models.decoder import Decoder
from manyroots.models.load import refill, rehearse
from manyroots.models.quantization import format_on
from manyroots.models.source import resolve_source
from manyroots.models.weight_bytes import weight_bytes
from tests.unit.models.lockstep import LockstepShard, in_lockstep
from tests.unit.models.paged import PagedModel
from tests.unit.models.test_fp8_loading import change, load, set_config
from tests.unit.models.test_logits_parity import expected, prompts
from tests.unit.models.tiny import save_tiny

MXFP4 = {"quant_method": "mxfp4"}


def save_mxfp4(
    folder: Path, *, intermediate_size: int = 32, seed: int = 5
) -> tuple[Any, dict[str, Tensor]]:
    """gpt-oss as it is published; gives transformers' model and the packed tensors."""
    sizes = {"hidden_size": 64, "intermediate_size": intermediate_size}
    theirs = save_tiny(folder, "gpt-oss", **sizes)
    draw = torch.Generator().manual_seed(seed)
    tensors, numbers = {}, theirs.state_dict()
    packed: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape, generator=draw, dtype=torch.uint8)
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, scales
        numbers[name] = torch.stack([unpacked(*both) for both in zip(blocks, scales, strict=True)])
        numbers[name] = numbers[name].float().transpose(1, 2)
    save_file({**tensors, **packed}, folder / "model.safetensors")
    set_config(folder, quantization_config=MXFP4)
    theirs.load_state_dict(numbers)
    return theirs, packed


def test_q02_gpt_oss_as_published_gives_the_logits_of_its_numbers(tmp_path: Path) -> None:
    theirs, _ = save_mxfp4(tmp_path)
    got = PagedModel(load(tmp_path)).step(prompts())
    for name, tokens in prompts().items():
        assert_close("logits", got[name], expected(theirs, tokens), torch.float32)


def test_q02_numbers_are_those_that_transformers_unpacks() -> None:
    """Q02: every byte, and exponents of every size that weights have."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).reshape(2, 8, 1, 16)
    scales = torch.arange(112, 128, dtype=torch.uint8).reshape(2, 8, 1)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    ours = torch.stack([unpacked(*both) for both in zip(blocks, scales, strict=True)])
    assert torch.equal(ours, theirs.transpose(1, 2))


def test_q02_half_of_a_matrix_is_refused_by_name(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    change(tmp_path, lambda tensors: tensors.pop("model.layers.0.mlp.experts.down_proj_scales"))
    with pytest.raises(ModelError, match=r"layers.0.mlp.down_proj .*blocks or the scales"):
        load(tmp_path)


def test_q02_what_is_quantized_in_another_way_is_not_rounded_again(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    with pytest.raises(ConfigError, match="quantized already"):
        load(tmp_path, "fp8")


def experts_of(model: Decoder) -> list[Mxfp4Matrix]:
    """All of them, in 4 bits."""
    found = []
    for layer in model.layers:
        assert isinstance(layer.feed_forward, SparseMLP)
        data = layer.feed_forward.experts.data
        assert isinstance(data.gate_up, Mxfp4Matrix)
        assert isinstance(data.down, Mxfp4Matrix)
        found += [data.gate_up, data.down]
    return found


def test_q02_experts_stay_in_4_bits_and_give_the_logits_of_their_numbers(tmp_path: Path) -> None:
    """Q02: with torch's operators and with the references."""
    theirs, _ = save_mxfp4(tmp_path)
    ours = load(tmp_path, "mxfp4")
    assert experts_of(ours)
    by_reference = load(tmp_path, "mxfp4", kernels=reference_kernels())
    for model in (ours, by_reference):
        got = PagedModel(model).step(prompts())
        for name, tokens in prompts().items():
            assert_close("logits", got[name], expected(theirs, tokens), torch.float32)


def test_q02_every_weight_is_the_checkpoints_bit_by_bit(tmp_path: Path) -> None:
    """Q02: beside what is read where experts are expanded, which is what transformers unpacks."""
    save_mxfp4(tmp_path)
    kept, expanded = load(tmp_path, "mxfp4").weights(), load(tmp_path).weights()
    names = [name for name in kept if name.endswith(".weight_mxfp4")]
    assert len(names) == 3 * len([n for n in expanded if n.endswith("gate_proj.weight")])
    for name in names:
        numbers = expanded[name.removesuffix("_mxfp4")].place
        assert torch.equal(kept[name].values, numbers), name
    assert kept.keys() - set(names) == expanded.keys() - {n.removesuffix("_mxfp4") for n in names}


def test_q02_what_experts_take_is_counted_before_they_are_loaded(tmp_path: Path) -> None:
    """Q02: 17 bits for 4 numbers, and rows filled up to 128."""
    save_mxfp4(tmp_path)
    model = load(tmp_path, "mxfp4")
    matrices = experts_of(model)
    assert sum(m.nbytes for m in matrices) == sum(
        m.shape[0] * m.shape[1] * 128 * 17 // 32 for m in matrices
    )
    plain = sum(fill.place.nbytes for name, fill in model.weights().items() if "mxfp4" not in name)
    counted = weight_bytes(
        model.spec, model.spec.vocab_size, torch.float32, Mxfp4Format(is_stored=True)
    )
    assert counted == sum(m.nbytes for m in matrices) + plain


def test_q02_two_ranks_give_one_ranks_logits(tmp_path: Path) -> None:
    """Q02: each has half of every expert."""
    save_mxfp4(tmp_path, intermediate_size=64)
    alone = PagedModel(load(tmp_path, "mxfp4")).step(prompts())

    def rank(shard: LockstepShard) -> dict[str, Tensor]:
        model = load(tmp_path, "mxfp4", shard=shard)
        assert experts_of(model)[1].shape[-1] == 32
        return PagedModel(model).step(prompts())

    results, _ = in_lockstep(2, rank)
    for result in results:
        for name, logits in alone.items():
            assert_close("logits", result[name], logits, torch.float32)


def test_q02_ranks_that_would_cut_a_group_are_refused(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    with pytest.raises(ConfigError, match=r"rows of 16 numbers .* smaller --tensor-parallel-size"):
        in_lockstep(2, lambda shard: load(tmp_path, "mxfp4", shard=shard).dtype)


def test_q02_unquantized_experts_are_rounded_if_that_is_asked_for(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt-oss", hidden_size=64, intermediate_size=32)
    plain, rounded = load(tmp_path).weights(), load(tmp_path, "mxfp4").weights()
    assert plain.keys() == rounded.keys()
    for name, fill in rounded.items():
        is_expert = ".experts." in name and name.endswith(".weight")
        assert torch.equal(fill.values, plain[name].place) != is_expert, name
        if is_expert:
            off = (fill.values - plain[name].place).norm() / plain[name].place.norm()
            assert off < 0.15, name


def test_q02_a_cpu_keeps_them_only_if_that_is_asked_for() -> None:
    """Q02: it has no operator for them, and a GPU has."""
    config = type("Config", (), {"model_type": "gpt_oss", "quantization_config": MXFP4})
    cpu, gpu, kept = torch.device("cpu"), torch.device("cuda"), Mxfp4Format(is_stored=True)
    assert format_on(cpu, config, "auto") == PLAIN
    assert format_on(cpu, config, "mxfp4") == format_on(gpu, config, "auto") == kept


def test_q02_other_models_have_no_such_experts(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    with pytest.raises(ConfigError, match="'mxfp4', which is for the experts of gpt-oss"):
        load(tmp_path, "mxfp4")


def test_q02_powers_that_no_model_has_are_refused(tmp_path: Path) -> None:
    """Q02: 255 stands for no number."""
    save_mxfp4(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    change(tmp_path, lambda tensors: tensors[name].view(-1)[3].fill_(255))
    with pytest.raises(ModelError, match=r"MXFP4 of more than 2\^128"):
        load(tmp_path, "mxfp4")


def test_q02_experts_in_4_bits_are_updated_in_place_from_such_a_checkpoint(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    save_mxfp4(one)
    save_mxfp4(other, seed=6)
    model = load(one, "mxfp4")
    before = [m.words.clone() for m in experts_of(model)]
    source = resolve_source(ModelSettings(model=str(other)))
    rehearse(model, source)
    refill(model, source)
    wanted = experts_of(load(other, "mxfp4"))
    assert all(
        torch.equal(m.words, w.words) for m, w in zip(experts_of(model), wanted, strict=True)
    )
    assert not torch.equal(before[0], wanted[0].words)
    save_tiny(tmp_path / "plain", "gpt-oss", hidden_size=64, intermediate_size=32)
    with pytest.raises(ModelError, match=r"is unquantized, .* give weights in MXFP4"):
        rehearse(model, resolve_source(ModelSettings(model=str(tmp_path / "plain"))))
