"""`bench kernels`: every kernel is timed cold and compared, and a wrong one is said to be wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.kernels.triton_cases import DEVICE

from manyroots.bench.kernel_attention import Sequences  # isort: skip
from manyroots.bench.kernel_times import COLD_BYTES, num_copies  # isort: skip
from manyroots.bench.model_configs import MODEL_CONFIGS  # isort: skip
from manyroots.bench.kernels import PARTS, KernelWorkload, run_kernels  # isort: skip
from manyroots.cli.bench_kernels import PARTS as PARTS_OF_THE_COMMAND  # isort: skip
from manyroots.cli.main import main  # isort: skip
from manyroots.errors import ConfigError  # isort: skip
from manyroots.kernels import choice  # isort: skip

TINY = KernelWorkload(
    model_config="tiny-qwen3", parts=PARTS, rows=(3,), decodes=("3x5-40",), prompts=("2x6@9",),
    dtype="float32", is_fp8=False, num_adapters=0, adapter_rank=8, repeats=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about caches."""
    monkeypatch.setattr("manyroots.bench.kernel_times.COLD_BYTES", 1)
    monkeypatch.setattr("manyroots.bench.kernel_times.ROUND_S", 1e-6)


def names(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(case["part"], case["name"], case["way"]) for case in report["cases"]]


def test_every_kernel_of_a_layer_is_timed_and_compared(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    arguments = [
        "bench", "kernels", "--model-config", "tiny-qwen3", "--device", "cpu", "--rows", "1,5",
        "--decodes", "3x5-40", "--prompts", "2x6@9", "--repeats", "2", "--json", str(file),
    ]  # fmt: skip
    assert main(arguments) == 0
    report = json.loads(file.read_text())
    products = [("products", name, way) for name in ("qkv", "o", "gate_up", "down", "head", "layer")
                for _ in (1, 5) for way in ("ours", "library")]  # fmt: skip
    readers = [("readers", name, "ours") for name in ("gated", "norm") for _ in (1, 5)]
    attention = [(part, "attend", "ours") for part in ("decodes", "prompts")]
    assert names(report) == [*products, *readers, *attention]
    assert all(case["agrees"] and len(case["us"]["samples"]) == 2 for case in report["cases"])
    assert report["workload"]["rows"] == [1, 5]
    assert report["machine"]["torch"] == torch.__version__


def test_a_gpus_kernels_with_adapters_agree_with_their_references(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In Triton's interpreter where there is no GPU; what it takes there is of no account."""
    monkeypatch.setattr("manyroots.bench.kernel_times._microseconds", lambda *_: {
        "median": 1.0, "least": 1.0, "most": 1.0})  # fmt: skip
    report = run_kernels(
        replace(TINY, num_adapters=2), DEVICE, lambda spec, device: choice.kernel_set_of("triton")
    )
    assert report["all_agree"], report["cases"]
    assert ("products", "qkv", "library") not in names(report), "no library has adapters"


def test_f07_latent_attention_is_timed_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """F07: one query over latents, and prompts over expanded keys, some before them."""
    config = MODEL_CONFIGS["deepseek-v2-lite"]
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 3, "kv_lora_rank": 24}
    sizes |= {
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 9,
        "num_hidden_layers": 1,
        "hidden_size": 48,
    }
    monkeypatch.setitem(MODEL_CONFIGS, "tiny-latents", {**config, **sizes})
    workload = replace(TINY, model_config="tiny-latents", parts=("decodes", "prompts"))
    report = run_kernels(workload, torch.device("cpu"))
    assert names(report) == [(part, "latents", "ours") for part in ("decodes", "prompts")]
    assert report["all_agree"], report["cases"]


def test_a_kernel_that_is_wrong_or_fails_is_said_to_and_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = choice.kernels_for(torch.device("cpu"))
    attend = kernels.attention.attend

    def wrong(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        if len(q) == 3:
            raise RuntimeError("no such shape")
        out: torch.Tensor = attend(q, *rest)
        out[0, 0, 0] += 0.01  # one number of many
        return out

    monkeypatch.setattr(kernels.attention, "attend", wrong)
    report = run_kernels(replace(TINY, parts=("decodes", "prompts")), torch.device("cpu"))
    decodes, prompts = report["cases"]
    assert decodes["failed"] == "RuntimeError: no such shape"
    assert "us" not in decodes
    assert prompts["agrees"] is False
    assert not report["all_agree"]
    told = capsys.readouterr().err
    assert "FAILED RuntimeError: no such shape" in told
    assert "DIFFERS FROM ITS REFERENCE" in told


def test_sequences_are_what_they_say() -> None:
    assert Sequences.read("64x576").lens == (576,) * 64
    assert Sequences.read("4096@100") == Sequences("4096@100", (4096,), 100)
    drawn = Sequences.read("200x64-1280")
    assert len(drawn.lens) == 200
    assert 64 <= min(drawn.lens) < 100 < 1200 < max(drawn.lens) <= 1280
    for text in ("", "x5", "3x", "0x5", "5-3", "12@", "many"):
        with pytest.raises(ConfigError, match="no sequences"):
            Sequences.read(text)


def test_memory_is_read_in_turn_until_nothing_is_in_a_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("manyroots.bench.kernel_times.COLD_BYTES", COLD_BYTES)
    assert num_copies(50e6) * 50e6 >= COLD_BYTES
    assert num_copies(10 * COLD_BYTES) == 2, "even the largest is not read twice in a row"
    assert num_copies(1) == 16


def test_the_command_refuses_what_it_cant_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert PARTS_OF_THE_COMMAND == PARTS
    for arguments, said in (
        (["--prompts", "2y5"], "'2y5' says no sequences"),
        (["--adapters", "2", "--adapter-rank", "12"], "--adapter-rank is 12"),
        (["--fp8", "--part", "readers"], "--part readers is measured without --fp8"),
        (["--rows", "0"], "--rows is 0"),
    ):
        assert main(["bench", "kernels", "--device", "cpu", *arguments]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--adapters measures the kernels of a GPU"):
        run_kernels(replace(TINY, num_adapters=2), torch.device("cpu"))
