"""Q01, Q02: DeepSeek V4 as it is published: products in FP8, with powers of two as scales, and
experts in FP4."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from manyroots.config import ModelSettings
from manyroots.errors import ModelError
from manyroots.kernels.mxfp4 import Mxfp4Matrix, quantize
from manyroots.kernels.scaled import LARGEST, ScaledMatrix
from manyroots.kernels.tolerances import assert_close
from manyroots.layers.moe import SparseMLP
from manyroots.layers.shared_moe import SharedExpertMLP
from manyroots.layers.weights.formats import PLAIN
from manyroots.layers.weights.fp8 import Fp8Format
from manyroots.layers.weights.mxfp4 import Mxfp4Format
from manyroots.models.decoder import Decoder
from manyroots.models.load import refill, rehearse
from manyroots.models.quantization import format_on, itemsizes_on
from manyroots.models.source import resolve_source
from tests.unit.models.paged import PagedModel
from tests.unit.models.test_fp8_loading import change, load, ranks_of, set_config
from tests.unit.models.test_logits_parity import expected, prompts
from tests.unit.models.tiny import save_tiny

SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "o_lora_rank": 16, "num_hidden_layers": 2,
    "layer_types": ["compressed_sparse_attention", "sliding_attention"], "num_hash_layers": 1,
    "n_routed_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
FP8 = re.compile(r"attn\.(w\w+|indexer\.wq_b)\.weight$|shared_experts\.w\d\.weight$")
FP4 = re.compile(r"experts\.\d+\.w\d\.weight$")
CONFIG = {
    "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [16, 16],
    "activation_scheme": "dynamic",
}  # fmt: skip


def by_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """In FP8, and the power of two of each block."""
    rows, columns = weight.shape
    whole = torch.nn.functional.pad(weight, (0, -columns % 16, 0, -rows % 16))
    largest = torch.nn.functional.max_pool2d(whole.abs()[None], 16)[0]
    scales = (largest / LARGEST).log2().ceil().exp2()
    every = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :columns]
    return (weight / every).to(torch.float8_e4m3fn), scales.to(torch.float8_e8m0fnu)


def as_read(data: Tensor, scales: Tensor) -> Tensor:
    """The numbers of a weight, as transformers 5.23 reads them: FP4 has 32 to a scale, two to a
    byte, the lower half first."""
    powers = scales.float()
    if data.dtype is not torch.int8:
        every = powers.repeat_interleave(16, 0).repeat_interleave(16, 1)
        return data.float() * every[: data.shape[0], : data.shape[1]]
    halves = data.view(torch.uint8)
    codes = torch.stack((halves & 15, halves >> 4), dim=-1).flatten(-2).int()
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7]
    return torch.where(codes > 7, -sizes, sizes) * powers.repeat_interleave(32, 1)


def save_published(folder: Path, *, seed: int = 0) -> Any:
    """A checkpoint as published; gives transformers' model with its numbers."""
    theirs = save_tiny(folder, "deepseek-v4", seed=seed, **SIZES)
    tensors, numbers = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if FP4.search(name):
            blocks, exponents = quantize(tensor)
            data, scales = blocks.view(torch.int8), exponents.view(torch.float8_e8m0fnu)
        elif FP8.search(name):
            data, scales = by_block(tensor)
        else:
            tensors[name] = numbers[name] = tensor
            continue
        tensors[name], tensors[f"{name.removesuffix('weight')}scale"] = data, scales
        numbers[name] = as_read(data, scales)
    save_file(numbers, folder / "model.safetensors", {"format": "pt"})
    theirs = type(theirs).from_pretrained(folder, attn_implementation="eager").eval()
    save_file(tensors, folder / "model.safetensors")
    set_config(folder, quantization_config=CONFIG, expert_dtype="fp4")
    return theirs


def experts_of(model: Decoder) -> list[Any]:
    found = []
    for layer in model.layers:
        assert isinstance(layer.feed_forward, SharedExpertMLP)
        assert isinstance(layer.feed_forward.sparse, SparseMLP)
        data = layer.feed_forward.sparse.experts.data
        found += [data.gate_up, data.down]
    return found


@pytest.fixture
def keeps_fp4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts stay in 4 bits, as on a GPU."""
    monkeypatch.setattr(Mxfp4Format, "on", lambda self, device, is_asked: self)


def check(theirs: Any, logits: dict[str, Tensor]) -> None:
    for name, tokens in prompts().items():
        assert_close("logits", logits[name], expected(theirs, tokens), torch.float32)


def test_q02_deepseek_v4_as_published_gives_the_logits_of_its_numbers(tmp_path: Path) -> None:
    """Q02: products stay in FP8; a CPU expands experts."""
    theirs = save_published(tmp_path)
    ours = load(tmp_path)
    products = ours.layers[0].mixers[0].products()
    kept = [isinstance(one.weight.data, ScaledMatrix) for one in products]
    assert kept == [True] * 4 + [False, True], "all but what a compressor reads"
    assert all(isinstance(one, Tensor) for one in experts_of(ours))
    check(theirs, PagedModel(ours).step(prompts()))
    assert ours.num_bytes == sum(fill.place.nbytes for fill in ours.weights().values())


def test_q02_experts_of_deepseek_v4_stay_in_4_bits(tmp_path: Path, keeps_fp4: None) -> None:
    """Q02: as on a GPU; on two ranks, and updated in place."""
    one, other = tmp_path / "one", tmp_path / "other"
    theirs = save_published(one)
    for logits in ranks_of(one):
        check(theirs, logits)
    theirs = save_published(other, seed=1)
    ours = load(one)
    assert all(isinstance(one, Mxfp4Matrix) for one in experts_of(ours))
    source = resolve_source(ModelSettings(model=str(other)))
    rehearse(ours, source)
    refill(ours, source)
    check(theirs, PagedModel(ours).step(prompts()))


def test_q02_half_of_an_expert_is_refused(tmp_path: Path) -> None:
    save_published(tmp_path)
    name = "model.layers.0.ffn.experts.2.w1.scale"
    scales = load_file(tmp_path / "model.safetensors")[name]
    change(tmp_path, lambda tensors: tensors.update({name: scales.float()}))
    with pytest.raises(ModelError, match=r"scales of .*experts.2.gate_proj .* power of two"):
        load(tmp_path)
    change(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=r"experts.2.gate_proj in FP8, and not scales"):
        load(tmp_path)


def test_q02_bytes_of_experts_in_4_bits_are_counted_before_they_are_loaded() -> None:
    """Q02: where a device keeps them so."""
    said = {"quantization_config": {**CONFIG, "expert_dtype": "fp4"}, "model_type": "deepseek_v4"}
    config, cpu, gpu = type("Config", (), said), torch.device("cpu"), torch.device("cuda")
    kept = format_on(gpu, config, "auto")
    assert isinstance(kept, Fp8Format)
    assert kept.for_experts == Mxfp4Format(is_stored=True)
    assert kept.made_up().for_experts == Mxfp4Format()
    assert format_on(cpu, config, "auto").for_experts == PLAIN
    assert itemsizes_on(gpu, config, "auto", torch.bfloat16) == (1.25, 17 / 32)
    assert itemsizes_on(cpu, config, "auto", torch.bfloat16) == (1.25, 2)
