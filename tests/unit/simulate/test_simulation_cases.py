"""Simulations whose outcome is known beforehand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from manyroots.errors import ConfigError
from manyroots.messages import FinishReason
from manyroots.simulate.costs import StepLoad
from manyroots.simulate.faults import Faults
from manyroots.simulate.offline import endless_hit_rate
from manyroots.simulate.paths import lay_out
from manyroots.simulate.records import SimulationError
from manyroots.simulate.settings import SimulationSettings
from manyroots.simulate.simulation import SimulationRun, simulate
from manyroots.simulate.summary import summarize
from manyroots.simulate.synthetic import synthetic_trace
from manyroots.simulate.trace import EndsBy, Trace, TraceRequest
from manyroots.simulate.traffic import TraceSequence
from tests.unit.simulate.traces import COSTS, line

SETTINGS = SimulationSettings(num_pages=1000, max_num_seqs=32)


def run(
    *lines: TraceRequest, settings: SimulationSettings = SETTINGS, audit: bool = True
) -> SimulationRun:
    return simulate(lines, settings, COSTS, seed=0, audit=audit)


def prefill_s(num_tokens: int, behind: int = 0) -> float:
    pairs = num_tokens * behind + num_tokens * (num_tokens + 1) // 2
    return COSTS.step_s(StepLoad(num_tokens, pairs, 0, 0))


def decode_s(*contexts: int) -> float:
    return COSTS.step_s(StepLoad(0, 0, len(contexts), sum(contexts)))


@pytest.mark.parametrize("ends_by", list(EndsBy))
def test_a_request_alone_takes_what_the_cost_model_says(ends_by: EndsBy) -> None:
    [record] = run(line(3.0, ("p", 100), output_tokens=4, ends_by=ends_by)).records
    assert record.ttft_s == pytest.approx(prefill_s(100))
    # Token i is computed when i tokens of output are known: it attends to them and the prompt.
    decodes = [decode_s(100 + i) for i in (1, 2, 3)]
    assert record.e2e_s == pytest.approx(prefill_s(100) + sum(decodes))
    reason = FinishReason.LENGTH if ends_by is EndsBy.LENGTH else FinishReason.STOP
    assert record.finish_reason is reason


def test_a_long_prompt_takes_one_step_per_chunk() -> None:
    settings = replace(SETTINGS, max_num_batched_tokens=64)
    [record] = run(line(0.0, ("p", 150), output_tokens=1), settings=settings).records
    assert record.ttft_s == pytest.approx(
        prefill_s(64) + prefill_s(64, behind=64) + prefill_s(22, behind=128)
    )


def test_a_step_that_was_planned_for_an_ended_reply_is_paid_for() -> None:
    """A stop token is seen one step late, and that step costs; a length limit is seen coming."""
    by_length = run(line(0.0, ("p", 100)))
    by_stop = run(line(0.0, ("p", 100), ends_by=EndsBy.STOP))
    assert by_stop.num_steps == by_length.num_steps + 1


def test_time_passes_between_requests_that_do_not_meet() -> None:
    result = run(line(0.0, ("p", 100)), line(50.0, ("q", 100)))
    first, second = result.records
    assert first.ttft_s == pytest.approx(second.ttft_s)
    assert result.duration_s == pytest.approx(50 + second.e2e_s)
    assert result.busy_s == pytest.approx(first.e2e_s + second.e2e_s)


def test_what_was_computed_before_is_found_and_saves_its_time() -> None:
    first, second = run(line(0.0, ("p", 100)), line(9.0, ("p", 100), ("q", 28))).records
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 96)
    assert second.ttft_s == pytest.approx(prefill_s(32, behind=96))


def test_the_next_turn_finds_the_reply_of_the_last() -> None:
    turns = (
        line(0.0, ("q", 40), output_tokens=40, reply="answer"),
        line(9.0, ("q", 40), ("answer", 40), ("q2", 10)),
    )
    # The reply's last token was sampled, never computed: 79 tokens are there, 4 full pages.
    assert [record.num_cached_tokens for record in run(*turns).records] == [0, 64]


def test_namespaces_are_reported_apart() -> None:
    lines: Trace = tuple(
        line(float(i), ("p", 100), adapter=adapter, salt=salt)
        for i, (adapter, salt) in enumerate(
            [("a", None), (None, None), ("a", None), ("a", "t"), (None, None), (None, None)]
        )
    )
    summary = summarize(run(*lines))
    hits = {group.name: group.num_cached_tokens for group in summary.by_namespace}
    assert hits == {"(base)": 192, "a": 96, "a / t": 0}
    rates = {group.name: group.hit_rate for group in summary.by_adapter}
    assert rates == {"(base)": pytest.approx(192 / 300), "a": pytest.approx(96 / 300)}
    assert summary.all.hit_rate == pytest.approx(288 / 600)


def test_rollouts_reach_the_best_possible_hit_rate() -> None:
    """n samples of one prompt compute it once; 16 prompts share their instructions."""
    trace = synthetic_trace("rollouts", seed=3, num_requests=32)
    settings = replace(SETTINGS, num_pages=20_000, max_num_seqs=256)
    found = simulate(trace, settings, COSTS, seed=0)
    best = endless_hit_rate(lay_out(trace, settings.block_size))
    assert summarize(found).all.hit_rate == pytest.approx(best, abs=1e-12)
    expected = 0
    for i, asked in enumerate(trace):
        reusable = (asked.num_prompt_tokens - 1) // 16 * 16
        first = 0 if i % 16 == 0 else 256  # a batch has weights of its own
        expected += first + 7 * reusable
    total = sum(8 * asked.num_prompt_tokens for asked in trace)
    assert best == pytest.approx(expected / total)


def test_a_cache_too_small_retracts_and_still_finishes_everything() -> None:
    trace = synthetic_trace("rollouts", seed=3, num_requests=8)
    settings = replace(SETTINGS, num_pages=200, max_num_seqs=64)
    small = simulate(trace, settings, COSTS, seed=0)
    large = simulate(trace, replace(settings, num_pages=20_000), COSTS, seed=0)
    assert small.num_retractions > 0
    assert large.num_retractions == 0
    assert all(record.is_whole for record in small.records)
    assert small.duration_s > large.duration_s
    assert small.peak_held_pages <= 200 < large.peak_held_pages


def test_without_reuse_nothing_is_found() -> None:
    settings = replace(SETTINGS, enable_prefix_caching=False)
    result = run(line(0.0, ("p", 100)), line(9.0, ("p", 100)), settings=settings)
    assert summarize(result).all.num_cached_tokens == 0


def test_an_engine_that_mixes_namespaces_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of other weights hold the same tokens: only the namespace that asked before tells them
    apart."""
    lines = (line(0.0, ("p", 100), adapter="a"), line(9.0, ("p", 100), adapter="b"))
    assert summarize(run(*lines)).all.num_cached_tokens == 0
    honest = TraceSequence.to_submit
    monkeypatch.setattr(
        TraceSequence, "to_submit", lambda self: replace(honest(self), adapter=None)
    )
    with pytest.raises(SimulationError, match=r"reused 96 tokens, and its namespace .* has seen 0"):
        run(*lines)


def test_checking_pages_changes_no_result() -> None:
    trace = synthetic_trace("chat", seed=5, num_requests=6)
    checked, unchecked = (
        simulate(trace, SETTINGS, COSTS, seed=0, audit=audit) for audit in (True, False)
    )
    assert replace(checked, num_audits=0) == unchecked
    assert checked.num_audits >= checked.num_steps


def test_a_failed_step_fails_its_requests_and_no_later_ones() -> None:
    lines = [line(float(i), ("p", 40), output_tokens=8) for i in range(40)]
    result = simulate(
        tuple(lines), SETTINGS, COSTS, seed=1, faults=Faults(failed_steps=0.05), audit=True
    )
    summary = summarize(result)
    assert 0 < summary.num_failed <= result.num_failed_steps
    assert summary.num_finished + summary.num_failed == 40


def test_a_caller_who_leaves_ends_the_request() -> None:
    lines = [line(0.0, ("p", 40), output_tokens=20) for _ in range(40)]
    result = simulate(tuple(lines), SETTINGS, COSTS, seed=1, faults=Faults(aborts=0.5), audit=True)
    summary = summarize(result)
    assert 5 < summary.num_aborted < 35
    assert summary.num_finished == 40 - summary.num_aborted


def test_a_request_that_can_never_fit_is_refused_before_anything_runs() -> None:
    settings = replace(SETTINGS, num_pages=5)
    with pytest.raises(ConfigError, match="90 tokens with its output, and the cache holds 80"):
        run(line(0.0, ("p", 86)), settings=settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 3}, "--block-size is 3"),
        ({"num_pages": 0}, "--num-pages is 0"),
        ({"max_num_seqs": 0}, "--max-num-seqs is 0"),
        ({"max_num_batched_tokens": 8}, "--max-num-batched-tokens"),
        ({"depth": 2}, "depth is 2"),
        ({"num_host_pages": -1}, "--num-host-pages is -1"),
        ({"write_back": "never"}, "--write-back is 'never'"),
        ({"storage": True}, "--storage needs a host tier"),
        ({"max_loras": 3, "max_cpu_loras": 2}, "--max-cpu-loras is 2"),
    ],
)
def test_settings_that_cannot_work_name_their_flag(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SETTINGS, **changes)
