"""`bench decode` on a tiny shape: every case is run, through real adapters, and comes out sane."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from manyroots.bench.decode import STRUCTURED, DecodeWorkload, run_decode
from manyroots.bench.model_configs import MODEL_CONFIGS, write_config
from manyroots.bench.random_adapters import targets_of, write_adapters
from manyroots.cli.main import main
from manyroots.config import engine_settings
from manyroots.lora.files.folder import check_folder
from manyroots.models.source import resolve_source
from manyroots.store.adapter_files import read_adapter
from tests.unit.text.tiny_tokenizer import tiny_backend

WORKLOAD = DecodeWorkload(
    prompt_lens=(16, 16), output_len=8, batches=(1, 3), adapters=(0, 2), rank=4, repeats=1
)


def test_every_batch_is_run_without_lora_with_it_and_with_adapters_w20() -> None:
    """W20: and the first token of an adapter is timed by where its weights were."""
    report = run_decode(WORKLOAD, "tiny-qwen3", {"device": "cpu"}, cold=True)
    found = [(case["case"], case["batch"]) for case in report["cases"]]
    labels = ("base", "LoRA on, base rows only", "2 adapters")
    assert found == [(label, batch) for label in labels for batch in (1, 3)]
    assert all(case["ms_per_step"] > 0 and case["prefill_s"] > 0 for case in report["cases"])
    assert set(report["first_token_s"]) >= {"disk", "device", "host"}
    moves = report["adapter_moves_s"]
    assert set(moves["disk"]) == {"to_host", "to_device"}
    assert set(moves["host"]) == {"to_device"}
    assert {to: len(took) for to, took in moves["disk_burst_of_three"].items()} == {
        "to_host": 3,
        "to_device": 3,
    }
    assert moves["device"] == {}
    assert report["workload"]["prompt_lens"] == (16, 16)


TINY = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 8,
    "num_experts": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize("name", ["gpt-oss-20b", "qwen3-next-80b-a3b-24-layers", "qwen3.5-9b"])
def test_the_hybrids_shapes_run_with_adapters_too(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut down to what a test can compute; each batch with prompts of its own length."""
    whole = MODEL_CONFIGS[name]
    cut = {**whole, **{key: value for key, value in TINY.items() if key in whole}}
    monkeypatch.setitem(MODEL_CONFIGS, name, cut)
    workload = DecodeWorkload(
        prompt_lens=(24, 8), output_len=4, batches=(1, 2), adapters=(0, 2), rank=4, repeats=1,
        adapts_experts=name == "gpt-oss-20b",
    )  # fmt: skip
    report = run_decode(workload, name, {"device": "cpu"}, cold=False)
    assert [case["prompt_len"] for case in report["cases"]] == [24, 8] * 3
    base, adapted = report["cases"][1]["floors"], report["cases"][5]["floors"]
    assert 0 < base["decode_gb_per_step"] < adapted["decode_gb_per_step"]
    assert base["prefill_tflop_per_s"] > 0
    assert "decode_share" not in base, "this device was not measured"


def test_a_list_of_lengths_that_is_not_one_for_each_batch_is_refused() -> None:
    arguments = ["bench", "decode", "--model-config", "tiny-qwen3", "--batch", "1,2,3"]
    assert main([*arguments, "--prompt-len", "8,16"]) != 0


def test_the_command_writes_its_workload_and_machine(tmp_path: Path) -> None:
    target = tmp_path / "decode.json"
    code = main(
        [
            "bench", "decode", "--model-config", "tiny-qwen3", "--batch", "2", "--adapters", "0",
            "--prompt-len", "8", "--output-len", "4", "--repeats", "1", "--json", str(target),
        ]
    )  # fmt: skip
    assert code == 0
    report = json.loads(target.read_text())
    assert report["model_config"] == "tiny-qwen3"
    assert report["machine"]["torch"]
    assert [case["batch"] for case in report["cases"]] == [2]


@pytest.mark.parametrize("name", ["tiny-qwen3"])
def test_random_adapters_differ_in_content_and_fit_the_model(name: str, tmp_path: Path) -> None:
    model = write_config(name, tmp_path)
    settings = engine_settings({"model": str(model), "load_format": "dummy"})
    targets = targets_of(resolve_source(settings.model))
    digests = set()
    for folder in write_adapters(targets, tmp_path, count=3, rank=4):
        check_folder(folder, None)
        spec, _ = read_adapter(
            folder, targets, max_rank=4, dtype=torch.float32,
            vocab_size=MODEL_CONFIGS[name]["vocab_size"],
        )  # fmt: skip
        assert len(spec.pairs) == 7 * MODEL_CONFIGS[name]["num_hidden_layers"]
        digests.add(spec.digest)
    assert len(digests) == 3


def test_half_of_the_rows_can_have_a_shape(tmp_path: Path) -> None:
    """For G01's time per token: free rows and shaped ones in the same steps."""
    tiny_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    target = tmp_path / "decode.json"
    arguments = [
        "bench", "decode", "--model-config", "tiny-qwen3", "--batch", "4", "--adapters", "0",
        "--prompt-len", "8", "--output-len", "6", "--repeats", "1", "--structured",
    ]  # fmt: skip
    assert main([*arguments, "--tokenizer", str(tmp_path), "--json", str(target)]) == 0
    cases = json.loads(target.read_text())["cases"]
    assert [case["sampling"] for case in cases] == ["greedy", STRUCTURED]
    assert main(arguments) != 0, "a shape has no vocabulary"
