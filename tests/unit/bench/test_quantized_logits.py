"""`bench quantization`: FP8 weights of the default model keep its distributions (Q01)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from manyroots.bench.quantized_logits import compare, own_text
from manyroots.cli.main import main
from manyroots.kernels.blocks import can_multiply_blocks

MOST_KL = 0.02


@pytest.mark.nightly
def test_q01_fp8_weights_of_the_default_model_keep_its_distributions(tmp_path: Path) -> None:
    """Q01: real weights on real text; `manyroots bench quantization` takes more of it."""
    target = tmp_path / "fp8.json"
    assert main(["bench", "quantization", "--tokens", "256", "--json", str(target)]) == 0
    report = json.loads(target.read_text())
    assert 0.0 < report["mean_kl"] < MOST_KL
    assert report["greedy_agreement"] > 0.8
    assert report["mean_kl"] < report["with_rows_rounded"]["mean_kl"] < 2 * MOST_KL
    assert report["places"] == 256 - 8
    assert report["as_served"]["places"] == 128
    assert 0.0 < report["as_served"]["mean_kl"] < MOST_KL


@pytest.mark.skipif(
    not can_multiply_blocks(torch.device("cpu"), torch.float32), reason="no such operator here"
)
def test_q03_products_of_the_default_models_blocks_keep_its_distributions(tmp_path: Path) -> None:
    """Q03: rows of 8 bits are all that is rounded."""
    target = tmp_path / "w4a8.json"
    flags = ("--quantization", "w4a8", "--tokens", "64", "--json", str(target))
    assert main(["bench", "quantization", *flags]) == 0
    report = json.loads(target.read_text())
    assert 0.0 < report["mean_kl"] < 1.5 * MOST_KL
    assert report["greedy_agreement"] > 0.8
    assert "with_rows_rounded" not in report


def test_what_is_compared() -> None:
    exact = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    near = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]).log()
    found = compare(exact, near)
    wanted = (0.5 * torch.tensor(2.0).log() + 0.25 * torch.tensor(0.5).log()) / 2
    assert found["mean_kl"] == pytest.approx(float(wanted))
    assert found["greedy_agreement"] == 0.5
    assert compare(exact, exact)["mean_kl"] == 0.0


def test_the_text_is_prose_enough() -> None:
    words = own_text().split()
    assert len(words) > 4000
    assert len(set(words)) > 1000


def test_what_rounds_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "quantization", "--quantization", "auto"]) == 2
    assert "choose fp8" in capsys.readouterr().err
    assert main(["bench", "quantization", "--text", "nowhere.txt"]) == 2
    assert "nowhere.txt" in capsys.readouterr().err
