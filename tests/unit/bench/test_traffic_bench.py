"""`bench traffic`: cases are what they say, every request is run, and figures have their spread."""

from __future__ import annotations

import gc
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from manyroots.bench import traffic
from manyroots.bench.decode import decode_figures
from manyroots.bench.drive import RequestTimes, StepMark, Timeline
from manyroots.bench.model_configs import MODEL_CONFIGS
from manyroots.bench.spread import percentile, spread
from manyroots.bench.step_profile import WatchedStep, steps_by_kind
from manyroots.bench.traffic_cases import CASES
from manyroots.cli.main import main
from manyroots.engine.build import Engine, build_engine
from manyroots.engine.loop import EngineLoop
from manyroots.errors import ConfigError
from manyroots.ids import RequestId

SMALL = (
    "bench", "traffic", "--model-config", "tiny-qwen3", "--device", "cpu", "--requests", "12",
    "--lengths", "0.05", "--repeats", "2", "--max-num-seqs", "8", "--max-num-batched-tokens", "64",
)  # fmt: skip


def submits(name: str, *, with_adapters: bool = True):
    return CASES[name].submits(1000, "s", itertools.count(1), with_adapters=with_adapters)


def test_b02_the_mixed_case_is_512_requests_of_the_lengths_it_names() -> None:
    found = submits("mixed-greedy")
    assert len(found) == 512
    lengths = [len(submit.prompt) for submit in found]
    outputs = [submit.sampling.max_tokens for submit in found]
    assert 64 <= min(lengths) < 80 < 1000 < max(lengths) <= 1024
    assert 32 <= min(outputs) < 40 < 250 < max(outputs) <= 256
    assert all(submit.sampling.temperature == 0 and submit.sampling.ignore_eos for submit in found)
    sampled = submits("mixed-sampled")
    assert [submit.prompt for submit in sampled] == [submit.prompt for submit in found]
    assert {(s.sampling.temperature, s.sampling.top_p, s.sampling.top_k) for s in sampled} == {
        (0.7, 0.8, 20)
    }


def test_b02_shared_heads_are_sixteen_and_the_rest_is_each_requests_own() -> None:
    prompts = [tuple(submit.prompt) for submit in submits("shared-heads")]
    heads = Counter(prompt[:2048] for prompt in prompts)
    assert len(prompts) == 256
    assert list(heads.values()) == [16] * 16
    assert {len(prompt) for prompt in prompts} == {2048 + 256}
    assert len({prompt[2048:] for prompt in prompts}) == 256


def test_b02_adapters_come_in_turn_or_by_zipf_and_the_base_has_the_same_prompts() -> None:
    even = Counter(submit.adapter for submit in submits("adapters-8"))
    assert set(even.values()) == {64}
    uneven = Counter(submit.adapter for submit in submits("adapters-32"))
    assert uneven["adapter-0"] > 4 * uneven["adapter-15"] > 0
    base = submits("adapters-32", with_adapters=False)
    assert {submit.adapter for submit in base} == {None}
    assert [s.prompt for s in base] == [s.prompt for s in submits("adapters-32")]


def test_b02_a_case_runs_with_adapters_beside_its_base_and_under_load(tmp_path: Path) -> None:
    target = tmp_path / "traffic.json"
    case = ("--case", "adapters-of-many-ranks", "--with-base", "--load", "0.7")
    assert main([*SMALL, *case, "--json", str(target)]) == 0
    report = json.loads(target.read_text())
    [figures] = report["cases"]
    assert figures["workload"]["num_requests"] == 12
    assert figures["workload"]["prompt_len"] == [3, 51]
    outputs = [s.sampling.max_tokens for s in CASES["adapters-of-many-ranks"].shrunk(12, 0.05)
               .submits(1024, "s", itertools.count(), with_adapters=True)]  # fmt: skip
    assert figures["output_tokens"] == figures["base"]["output_tokens"] == sum(outputs)
    assert len(figures["seconds"]["samples"]) == 2
    assert set(figures["poisson"]) == {"with adapters", "base"}
    assert figures["poisson"]["base"]["time_to_first_token_s"]["p99"]["median"] > 0
    assert report["engine"]["max_num_seqs"] == 8
    assert report["machine"]["cpu"]


def test_b02_cases_that_want_the_same_engine_share_it_and_find_nothing_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B02: an engine for each kind of settings; cold prompts although both cases have the same."""
    started = []
    build = traffic.build_engine
    monkeypatch.setattr(traffic, "build_engine", lambda *a: started.append(a) or build(*a))
    target = tmp_path / "traffic.json"
    cases = ("--case", "mixed-greedy", "--case", "classify", "--case", "mixed-sampled")
    flags = ("--warm-ups", "0", "--repeats", "1", "--requests", "4", "--json", str(target))
    assert main([*SMALL, *cases, *flags]) == 0
    report = json.loads(target.read_text())
    assert len(started) == 2
    assert [c["case"] for c in report["cases"]] == ["mixed-greedy", "mixed-sampled", "classify"]
    assert [c["hit_rate"] for c in report["cases"]] == [0.0, 0.0, 0.0]
    assert report["warm_ups"] == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--case", "mixed"), "choose one of mixed-greedy"),
        (("--lengths", "0"), "--lengths is 0.0"),
        (("--load", "1.5"), "--load is 1.5"),
        (("--requests", "0"), "--requests is 0"),
        (("--warm-ups", "-1"), "--warm-ups is -1"),
    ],
)
def test_wrong_flags_are_named(
    flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "traffic", *flags]) == 2
    assert says in capsys.readouterr().err


def timeline(prefill_s: float, step_s: float, *, num_tokens: int = 9, batch: int = 4) -> Timeline:
    """Prompts in one step, then steps of all."""
    requests = {RequestId(i): RequestTimes(due_s=0.0) for i in range(batch)}
    marks = [
        StepMark(
            prefill_s + step * step_s, batch * (step + 1), batch,
            batch if step == num_tokens - 1 else 0,
        )
        for step in range(num_tokens)
    ]  # fmt: skip
    return Timeline(requests, marks)


def test_b04_a_slow_prompt_does_not_make_decoding_look_faster() -> None:
    """B04: each sample's decode is timed within its own run, so nothing is subtracted."""
    calm = [timeline(0.1, 0.010), timeline(0.1, 0.010)]
    disturbed = [timeline(0.1, 0.010), timeline(7.0, 0.010)]
    assert decode_figures(disturbed, 4)["ms_per_step"] == decode_figures(calm, 4)["ms_per_step"]
    assert decode_figures(calm, 4)["ms_per_step"] == pytest.approx(10.0)
    assert decode_figures(calm, 4)["decode_tokens_per_s"] == pytest.approx(400.0)


def test_b04_a_short_run_is_told_as_exactly_as_a_long_one() -> None:
    """B04: 24 tokens in 2.246 ms are 10,686 a second, and not the 10,909 of 2.2 ms."""
    assert spread([0.0022459, 0.0, 123.456789], 4) == {
        "median": 0.0022459,
        "least": 0.0,
        "most": 123.4568,
        "samples": [0.0022459, 0.0, 123.4568],
    }


def test_b04_a_slow_sample_shows_in_the_spread_and_never_lowers_the_figure() -> None:
    figures = decode_figures([timeline(0.1, s) for s in (0.010, 0.050, 0.011)], 4)
    assert figures["ms_per_step"] == pytest.approx(11.0)
    ms = figures["spread"]["ms_per_step"]
    assert (ms["least"], ms["most"]) == (pytest.approx(10.0), pytest.approx(50.0))
    slower = decode_figures([timeline(0.1, s) for s in (0.010, 0.500, 0.011)], 4)
    assert slower["ms_per_step"] >= figures["ms_per_step"]


def test_b04_a_batch_that_never_decodes_together_is_refused() -> None:
    line = Timeline(
        {RequestId(0): RequestTimes(0.0), RequestId(1): RequestTimes(0.0)},
        [StepMark(1.0, 1, 1, 0), StepMark(2.0, 2, 1, 1), StepMark(3.0, 4, 2, 2)],
    )
    with pytest.raises(ConfigError, match="--output-len"):
        line.all_decoding()


def test_spread_and_percentiles() -> None:
    assert spread([3.0, 1.0, 2.0])["median"] == 2.0
    assert percentile([5.0, 1.0, 2.0, 3.0, 4.0], 0.5) == 3.0
    assert percentile(list(range(1, 101)), 0.99) == 99
    assert percentile([7.0], 0.99) == 7.0


def test_b02_a_profile_has_every_step_and_all_of_the_time(tmp_path: Path, capsys) -> None:
    report = tmp_path / "traffic.json"
    main([*SMALL, "--repeats", "1", "--warm-ups", "0", "--profile", "--json", str(report)])
    case = json.loads(report.read_text())["cases"][0]
    kinds = case["profile"]["steps"]
    assert {row["kind"] for row in kinds} == {"decode", "mixed"}
    vocab_size = MODEL_CONFIGS["tiny-qwen3"]["vocab_size"]
    small = CASES["mixed-greedy"].shrunk(12, 0.05)
    asked = small.submits(vocab_size, "s", itertools.count(1), with_adapters=False)
    # An output's last token is computed no further.
    wanted = sum(len(submit.prompt) for submit in asked) + case["output_tokens"] - len(asked)
    assert sum(row["total_tokens"] for row in kinds) == wanted
    assert case["profile"]["kernels_per_step"] == []
    assert "steps by kind" in capsys.readouterr().err


def test_times_of_steps_and_waits_between_them_add_up_to_the_run() -> None:
    steps = [
        WatchedStep(8192, 0, launched_s=0.0, ended_s=0.2),
        WatchedStep(300, 40, launched_s=0.1, ended_s=0.25),
        WatchedStep(40, 40, launched_s=0.3, ended_s=0.31),
        WatchedStep(60, 60, launched_s=0.305, ended_s=0.33),
    ]
    kinds = {(row["kind"], row["at_most"]): row for row in steps_by_kind(steps)}
    assert kinds["mixed", None]["ms"] == 200.0
    assert kinds["mixed", 512] | {"ms": 50.0, "decodes": 40} == kinds["mixed", 512]
    decode = kinds["decode", 64]
    assert (decode["steps"], decode["total_ms"], decode["waiting_ms"]) == (2, 30.0, 50.0)
    assert sum(row["total_ms"] + row["waiting_ms"] for row in kinds.values()) == pytest.approx(330)


def test_b02_an_engine_is_gone_before_the_next_one_asks_for_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive = []

    def counted(*arguments: Any) -> Engine:
        gc.collect()
        alive.append(sum(isinstance(one, EngineLoop) for one in gc.get_objects()))
        return build_engine(*arguments)

    monkeypatch.setattr(traffic, "build_engine", counted)
    cases = ("--case", "streams-64", "--case", "classify")
    main([*SMALL, *cases, "--requests", "4", "--repeats", "1", "--warm-ups", "0"])
    first, second = alive
    assert second <= first


def test_b02_cases_of_one_engine_share_its_start_and_the_most_adapters(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    cases = ("--case", "adapters-8", "--case", "mixed-greedy", "--case", "adapters-16")
    arguments = ("--warm-ups", "0", "--repeats", "1", "--one-engine", "--json", str(report))
    assert main([*SMALL, *cases, *arguments]) == 0
    found = json.loads(report.read_text())["cases"]
    assert [case["case"] for case in found] == ["adapters-8", "mixed-greedy", "adapters-16"]
    assert len({case["start_s"] for case in found}) == 1
    assert all(case["start_stages_s"]["model files"] >= 0 for case in found)
    for case in found:
        assert case["made_in_runs"] == [{"kernel": 0, "graph": 0}]
        [steps] = case["steps"]
        assert sum(kind["total_tokens"] for kind in steps) > 0
    assert main([*SMALL, *cases, "--case", "adapters-200", "--one-engine"]) == 2
