"""Traffic on models whose layers see windows: what is held, and what is still found."""

from __future__ import annotations

from fractions import Fraction

import pytest

from manyroots.cli.main import main
from manyroots.errors import ConfigError
from manyroots.simulate.job import load_trace
from manyroots.simulate.offline import endless_hit_rate
from manyroots.simulate.paths import lay_out
from manyroots.simulate.presets import H200_QWEN3_8B, ROUND_NUMBERS
from manyroots.simulate.settings import SimulationSettings
from manyroots.simulate.simulation import simulate
from manyroots.simulate.trace import EndsBy, Trace, TraceRequest
from manyroots.simulate.trace import TraceSegment as Segment
from manyroots.simulate.windows import parse_windows


def hit_rate(trace: Trace, settings: SimulationSettings, *, audit: bool = False) -> float:
    costs = ROUND_NUMBERS.costs if audit else H200_QWEN3_8B.costs
    run = simulate(trace, settings, costs, seed=0, audit=audit)
    found = sum(record.num_cached_tokens for record in run.records)
    return found / sum(record.sequence.line.num_prompt_tokens for record in run.records)


def seats(count: int, num_tokens: int, rounds: int, *, times: int = 1) -> Trace:
    """Sessions with prompts of their own that take turns, each so many times in a row, each time
    with a short new end."""
    lines, said = [], {n: (Segment(f"seat-{n}", num_tokens),) for n in range(count)}
    for _ in range(rounds):
        for seat in (seat for seat in range(count) for _ in range(times)):
            reply = Segment(f"answer-{len(lines)}", 40)
            prompt = (*said[seat], Segment(f"question-{len(lines)}", 25))
            lines.append(
                TraceRequest(
                    arrival_s=2.0 * len(lines),
                    prompt=prompt,
                    adapter=None,
                    salt=None,
                    output_tokens=reply.length,
                    reply=reply.name,
                    ends_by=EndsBy.STOP,
                )
            )
            said[seat] = (*prompt, reply)
    return tuple(lines)


@pytest.mark.parametrize(("count", "num_tokens"), [(8, 4500), (12, 3000), (3, 12_000)])
def test_f09_sessions_that_take_turns_lose_no_hit_at_a_part_of_the_memory(
    count: int, num_tokens: int
) -> None:
    """F09, P07: vLLM #48435. Gemma-4-31B (windows of 1024 in five of six layers, contexts to 65536,
    8 rows) with memory for 2.34 of the longest requests; sessions of 36,000 tokens together found
    nothing of what they had said. Here each finds all of it."""
    longest = 65536 + 5 * (1024 + 2048)
    settings = SimulationSettings(
        windows=("1024:5/6",),
        max_model_len=65536,
        num_pages=int(2.34 * longest / 6 / 16),
        max_num_seqs=8,
    )
    trace = seats(count, num_tokens, rounds=4)
    assert hit_rate(trace, settings) == endless_hit_rate(lay_out(trace, 16))


@pytest.mark.parametrize(
    ("windows", "num_pages"),
    [
        (("512:5/6",), 1500),
        (("1024:5/6",), 2000),
        (("128:1/2",), 1500),
        (("4096:1",), 2000),
        (("128:1/3", "1024:1/3"), 2000),
    ],
    ids=["5:1", "5:1, wide", "1:1", "windows alone", "two windows"],
)
def test_p07_chats_find_what_an_endless_cache_would_where_memory_suffices(
    windows: tuple[str, ...], num_pages: int
) -> None:
    """P07: at least 0.98 of it. Talks whose windows have moved on go on from their newest page."""
    trace = load_trace("chat", seed=1, num_requests=30)
    settings = SimulationSettings(windows=windows, num_pages=num_pages)
    assert hit_rate(trace, settings) >= 0.98 * endless_hit_rate(lay_out(trace, 16))


@pytest.mark.parametrize("windows", [("48:5/6",), ("40:1",), ("24:1/3", "64:1/3")])
def test_p07_every_page_read_is_right_where_windows_are_short_of_room(
    windows: tuple[str, ...],
) -> None:
    """P07, R01: all invariants after every step, and every page that is read holds what it should,
    while talks take each other's pages."""
    trace = seats(6, 90, rounds=2, times=2)
    settings = SimulationSettings(
        block_size=4, windows=windows, num_pages=48, max_model_len=400,
        max_num_seqs=4, max_num_batched_tokens=32,
    )  # fmt: skip
    assert 0 < hit_rate(trace, settings, audit=True) < endless_hit_rate(lay_out(trace, 4))


def test_windows_are_given_as_sizes_and_shares() -> None:
    assert parse_windows(("512:5/6",)) == {None: Fraction(1, 6), 512: Fraction(5, 6)}
    assert parse_windows(("4096:1",)) == {4096: 1}
    assert parse_windows(("128:1/4", "64:0.5")) == {
        None: Fraction(1, 4), 128: Fraction(1, 4), 64: Fraction(1, 2),
    }  # fmt: skip
    for wrong in ("512", "512:", "0:1/2", "512:0", "512:3/2", "x:1/2", "512:1/0"):
        with pytest.raises(ConfigError, match="--window"):
            parse_windows((wrong,))
    with pytest.raises(ConfigError, match="more than all"):
        parse_windows(("128:2/3", "64:2/3"))
    with pytest.raises(ConfigError, match="each size once"):
        parse_windows(("128:1/3", "128:1/3"))
    with pytest.raises(ConfigError, match="--num-host-pages"):
        SimulationSettings(windows=("128:1/2",), num_host_pages=10)


def test_s05_windows_can_be_simulated_from_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """S05: and what each family got is told."""
    flags = ["--num-requests", "12", "--window", "512:5/6", "--num-pages", "3000"]
    assert main(["simulate", "chat", *flags]) == 0
    shown = capsys.readouterr().out
    assert "window-512: " in shown
    assert "hit rate" in shown
