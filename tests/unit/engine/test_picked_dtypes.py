"""`--dtype auto` takes what the chip is fast at; what it is slow at is served, with a warning."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manyroots import LLM, SamplingParams
from manyroots.config import ModelSettings
from manyroots.engine import worker
from manyroots.engine.worker import pick_dtype
from manyroots.models.chip import Chip
from manyroots.models.source import ModelSource, resolve_source
from tests.helpers.tiny_adapters import TinyAdapters
from tests.unit.models.tiny import tiny_source

CPU = torch.device("cpu")
XEON = Chip("Xeon", frozenset({"avx512f", "avx512_bf16", "amx_bf16"}), library_has_bf16=True)
ZEN4 = Chip("Zen 4", frozenset({"avx512f", "avx512_bf16"}), library_has_bf16=True)
V1 = Chip("Neoverse-V1", frozenset({"bf16", "i8mm", "asimdhp"}), library_has_bf16=True)
SKYLAKE = Chip("Skylake", frozenset({"avx512f"}), library_has_bf16=True)
N1 = Chip("Neoverse-N1", frozenset({"asimddp", "asimdhp"}), library_has_bf16=False)
OTHER_BUILD = replace(V1, library_has_bf16=False)
FAST = [XEON, ZEN4, V1]
CHIPS = [*FAST, SKYLAKE, N1, OTHER_BUILD]


def source_of(dtype: torch.dtype | None) -> ModelSource:
    source = tiny_source()
    source.config.dtype = dtype
    return source


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
@pytest.mark.parametrize("own", [torch.bfloat16, torch.float16, torch.float32, None], ids=str)
def test_auto_is_bfloat16_where_the_checkpoint_is_and_the_chip_is_fast_at_it(
    own: torch.dtype | None, chip: Chip, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        picked = pick_dtype(ModelSettings(), source_of(own), CPU, chip)
    is_fast = chip in FAST and own is torch.bfloat16
    assert picked is (torch.bfloat16 if is_fast else torch.float32)
    assert f"--dtype auto: {'bfloat16' if is_fast else 'float32'}, since" in caplog.text
    assert (chip.name in caplog.text) == (own is torch.bfloat16)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("said", ["dtype", "torch_dtype"])
def test_a_text_model_that_alone_says_its_dtype_is_heard(said: str, tmp_path: Path) -> None:
    """Of checkpoints that also see: on a CPU they took twice the memory."""
    text = {"model_type": "gemma3_text", said: "bfloat16"}
    config = {"model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = ModelSettings(model=str(tmp_path))
    assert pick_dtype(settings, resolve_source(settings), CPU, XEON) is torch.bfloat16


def test_blocks_of_4_bits_are_multiplied_with_float32_on_every_chip() -> None:
    settings = ModelSettings(quantization="w4a8")
    for chip in CHIPS:
        assert pick_dtype(settings, source_of(torch.bfloat16), CPU, chip) is torch.float32


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
@pytest.mark.parametrize("asked", ["bfloat16", "float16", "float32"])
def test_what_is_asked_for_is_taken_and_warned_of_where_it_is_slow(
    asked: str, chip: Chip, caplog: pytest.LogCaptureFixture
) -> None:
    picked = pick_dtype(ModelSettings(dtype=asked), source_of(torch.float32), CPU, chip)
    assert picked is getattr(torch, asked)
    is_slow = asked == "float16" or (asked == "bfloat16" and chip in (N1, OTHER_BUILD))
    assert ("leave --dtype out" in caplog.text) == is_slow


def test_an_engine_on_a_fast_chip_serves_a_bfloat16_checkpoint_in_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = TinyAdapters(tmp_path).model
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for chip, dtype in ((XEON, "bfloat16"), (N1, "float32")):
        monkeypatch.setattr(worker, "this_chip", lambda chip=chip: chip)
        with LLM(str(folder), num_gpu_blocks_override=16, max_num_seqs=4) as llm:
            assert llm.info.dtype == dtype
            assert len(llm.generate([[5, 6, 7]] * 2, greedy)[1].outputs[0].token_ids) == 3


def test_a_gpu_computes_in_the_checkpoints_own_whatever_the_cpu_is() -> None:
    gpu = torch.device("cuda")
    for own in (torch.bfloat16, torch.float16, torch.float32):
        assert pick_dtype(ModelSettings(), source_of(own), gpu, N1) is own
    assert pick_dtype(ModelSettings(), source_of(None), gpu) is torch.bfloat16
