"""The floors under `bench decode`'s figures: counted by hand for public shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from manyroots.bench.floors import ceiling_of
from manyroots.bench.model_configs import MODEL_CONFIGS, write_config
from manyroots.bench.random_adapters import chosen, targets_of
from manyroots.config import engine_settings
from manyroots.models.load import describe
from manyroots.models.quantization import itemsizes_on
from manyroots.models.roofline import Roofline, expected_experts
from manyroots.models.source import ModelSource, resolve_source


def _source(name: str, folder: Path) -> ModelSource:
    model = str(write_config(name, folder))
    return resolve_source(engine_settings({"model": model, "load_format": "dummy"}).model)


def _roofline(name: str, folder: Path) -> Roofline:
    return Roofline(describe(_source(name, folder)), torch.bfloat16, 2)


def test_a_dense_models_step_reads_its_products_and_what_rows_see(tmp_path: Path) -> None:
    line = _roofline("qwen3-8b", tmp_path)
    by_layer = 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 12288 + 2 * 128
    weights = 2 * (36 * by_layer + (151936 + 8) * 4096)
    assert line.weight_bytes(8) == weights
    by_token = 36 * 2 * 8 * 128 * 2
    assert line.decode_bytes(8, 1000) == weights + 8 * 1000 * by_token
    assert line.prompt_flops(8, 2048) == 2 * 8 * (2048 * 36 * by_layer + 151936 * 4096)


def test_a_window_is_all_that_its_layers_read(tmp_path: Path) -> None:
    line = _roofline("gpt-oss-20b", tmp_path)
    by_token = 12 * 2 * 8 * 64 * 2
    assert line.row_bytes(2048) == by_token * (2048 + 128)
    assert line.row_bytes(100) == by_token * 200


def test_states_are_read_and_written_whatever_the_length(tmp_path: Path) -> None:
    line = _roofline("qwen3-next-80b-a3b-24-layers", tmp_path)
    matrix, conv = 32 * 128 * 128 * 4, (2 * 16 * 128 + 32 * 128) * 3 * 2
    by_token = 6 * 2 * 2 * 256 * 2
    assert line.row_bytes(1000) == 2 * 18 * (matrix + conv) + 1000 * by_token
    assert line.row_bytes(0) == 2 * 18 * (matrix + conv)


def test_of_experts_as_many_are_read_as_tokens_are_expected_to_choose(tmp_path: Path) -> None:
    line = _roofline("qwen3-next-80b-a3b-24-layers", tmp_path)
    experts = line.spec.layers[0].experts
    assert experts is not None
    assert expected_experts(experts, 1) == pytest.approx(10)
    assert 74 < expected_experts(experts, 8) < 80
    assert expected_experts(experts, 100_000) == pytest.approx(512)
    one = 3 * 2048 * 512 * 2
    more = line.weight_bytes(8) - line.weight_bytes(1)
    expected = 24 * one * (expected_experts(experts, 8) - 10) + 7 * 2048 * 2
    assert more == pytest.approx(expected)


@pytest.mark.parametrize("name", sorted(MODEL_CONFIGS))
def test_every_shape_is_a_model_that_we_describe(name: str, tmp_path: Path) -> None:
    """And whose weights fit an H200 with room for a batch."""
    source = _source(name, tmp_path)
    line = Roofline(describe(source), torch.bfloat16, 2)
    assert 0 < line.weight_bytes(100_000) < 100e9
    assert line.prompt_flops(1, 1) > 0


def test_adapters_add_what_their_rows_use(tmp_path: Path) -> None:
    source = _source("tiny-qwen3", tmp_path)
    line = Roofline(describe(source), torch.bfloat16, 2)
    targets = list(chosen(targets_of(source)).values())
    one = line.adapter_bytes(targets, 4, 1, 8)
    assert one == 2 * 4 * sum(target.in_features + target.out_features for target in targets)
    assert line.adapter_bytes(targets, 4, 8, 2) == 2 * one, "two rows use two adapters"
    assert line.adapter_bytes(targets, 4, 0, 8) == 0


def test_shares_are_said_of_devices_that_were_measured() -> None:
    assert ceiling_of("NVIDIA H200") is not None
    assert ceiling_of("NVIDIA A100-SXM4-80GB") is None


def test_q02_experts_in_mxfp4_are_read_as_they_are(tmp_path: Path) -> None:
    source = _source("gpt-oss-20b", tmp_path)
    sizes = itemsizes_on(torch.device("cuda"), source.config, "mxfp4", torch.bfloat16)
    line = Roofline(describe(source), torch.bfloat16, *sizes)
    plain = _roofline("gpt-oss-20b", tmp_path)
    experts = line.spec.layers[0].experts
    assert experts is not None
    read = 24 * expected_experts(experts, 8) * 3 * 2880 * 2880
    less = plain.weight_bytes(8) - line.weight_bytes(8)
    assert less == pytest.approx(read * (2 - 17 / 32))


def test_f10_a_step_reads_a_window_all_keys_of_the_index_and_the_chosen_entries(
    tmp_path: Path,
) -> None:
    """F10: of DeepSeek V4's layers. Rows of an open group are read once for each group, so a step
    reads its share of them."""
    line = _roofline("deepseek-v4-flash-6-layers", tmp_path)
    windows = 6 * 128 * 512
    sparse = 2 * (8000 * 128 + 512 * 512 + 2 * 4 * (512 + 128))
    heavy = 2 * (250 * 512 + 2 * 512)
    assert line.row_bytes(32_000) == pytest.approx(2 * (windows + sparse + heavy))
