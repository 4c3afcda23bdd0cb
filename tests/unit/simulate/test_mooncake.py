"""B05: traces in Mooncake's format: what they mean, and what is said of a line that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyroots.cli.main import main
from manyroots.errors import ConfigError
from manyroots.simulate.offline import endless_hit_rate
from manyroots.simulate.paths import lay_out
from manyroots.simulate.trace_file import read_trace, write_trace

GOOD: dict[str, Any] = {
    "timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2, 3],
}  # fmt: skip


def line(at_ms: int, length: int, ids: list[int], output: int = 5) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": length, "output_length": output, "hash_ids": ids}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [text if isinstance(text, str) else json.dumps(text) for text in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def test_b05_blocks_become_tokens_that_are_the_same_wherever_the_number_is(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line(0, 1200, [1, 2, 3]), line(2500, 1030, [1, 2, 9]))
    first, second = read_trace(path)
    assert (first.arrival_s, second.arrival_s) == (0.0, 2.5)
    assert (first.output_tokens, first.adapter, first.salt) == (5, None, None)
    tokens = first.prompt_tokens()
    assert len(tokens) == first.num_prompt_tokens == 1200
    assert np.array_equal(second.prompt_tokens()[:1024], tokens[:1024])
    assert not np.array_equal(second.prompt_tokens()[1024:], tokens[1024:1030])


@pytest.mark.parametrize("page_size", [16, 128, 512])
def test_b05_the_endless_hit_rate_is_that_of_the_blocks(tmp_path: Path, page_size: int) -> None:
    """Prompts share the blocks that they begin with alike, whatever a page is."""
    path = write(
        tmp_path / "t.jsonl",
        line(0, 1100, [1, 2, 3]),
        line(10, 2000, [1, 2, 4, 5]),  # two blocks
        line(20, 700, [2, 1]),  # none: not where they were
        line(30, 1600, [1, 2, 4, 6]),  # three blocks
    )
    rate = endless_hit_rate(lay_out(read_trace(path), page_size))
    assert rate == pytest.approx((2 + 3) * 512 / (1100 + 2000 + 700 + 1600))


def test_b05_only_as_many_lines_as_are_asked_for_are_read(tmp_path: Path) -> None:
    lines = [line(i, 600, [i, i + 1]) for i in range(10)]
    path = write(tmp_path / "t.jsonl", *lines, "nonsense")
    assert [r.arrival_s for r in read_trace(path, num_requests=4)] == [0, 0.001, 0.002, 0.003]
    assert [r.arrival_s for r in read_trace(path, num_requests=3, every=4)] == [0, 0.004, 0.008]
    with pytest.raises(ConfigError, match="line 11: not JSON"):
        read_trace(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timestamp": -1}, "timestamp is -1; it must be a number of milliseconds"),
        ({"timestamp": "0"}, "timestamp is '0'"),
        ({"timestamp": True}, "timestamp is True"),
        ({"input_length": 0}, "input_length is 0"),
        ({"input_length": 12.5}, "input_length is 12.5"),
        ({"output_length": 0}, "output_length is 0"),
        ({"output_length": None}, "output_length is None"),
        ({"hash_ids": [1, 2]}, "hash_ids must be a list of 3 block numbers.*not 2 of them"),
        ({"hash_ids": "1,2,3"}, "hash_ids must be a list of 3 block numbers.*not '1,2,3'"),
        ({"hash_ids": [1, -2, 3]}, r"hash_ids\[1\] is -2"),
        ({"hash_ids": [1, 2, "3"]}, r"hash_ids\[2\] is '3'"),
        ({"hash_ids": [1, True, 3]}, r"hash_ids\[1\] is True"),
    ],
)
def test_b05_a_wrong_line_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, "", {**GOOD, **changes})
    with pytest.raises(ConfigError, match=f"t.jsonl, line 3: {message}"):
        read_trace(path)


@pytest.mark.parametrize("name", sorted(GOOD))
def test_b05_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    wrong = {key: value for key, value in GOOD.items() if key != name}
    path = write(tmp_path / "t.jsonl", GOOD, wrong)
    with pytest.raises(ConfigError, match=f"line 2: {name} is missing"):
        read_trace(path)


def test_b05_a_trace_of_ours_with_a_line_of_theirs_is_refused(tmp_path: Path) -> None:
    ours = {"arrival": 0.0, "prompt": [1], "adapter": None, "output_tokens": 1}
    with pytest.raises(ConfigError, match="line 2: timestamp is missing"):
        read_trace(write(tmp_path / "a.jsonl", GOOD, ours))
    with pytest.raises(ConfigError, match="line 2: arrival is missing"):
        read_trace(write(tmp_path / "b.jsonl", ours, GOOD))


def test_b05_it_can_be_written_as_a_trace_of_ours(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", line(0, 600, [1, 2]), line(9, 700, [1, 3])))
    write_trace(tmp_path / "ours.jsonl", trace)
    assert read_trace(tmp_path / "ours.jsonl") == trace


def test_b05_a_run_is_shown_beside_the_best_offline_policy_and_the_endless_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line(1000 * i, 1100, [i % 3, 10 + i % 3, 100 + i]) for i in range(30)]
    path, result = write(tmp_path / "t.jsonl", *lines), tmp_path / "result.json"
    flags = ["--block-size", "512", "--num-pages", "4", "--json", str(result)]
    assert main(["simulate", str(path), *flags]) == 0
    shown = capsys.readouterr().out
    rates = json.loads(result.read_text())
    best, endless = rates["best_offline_hit_rate"], 27 * 1024 / (30 * 1100)
    assert rates["endless_hit_rate"] == pytest.approx(endless)
    assert rates["summary"]["all"]["hit_rate"] <= best < endless
    said = f"best offline policy in the device's pages {best:.4f}, endless cache {endless:.4f}"
    assert said in " ".join(shown.split())


def test_b05_hit_rates_of_pools_by_pages_bytes_and_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line(i, 1100, [i % 3, 10 + i % 3, 100 + i]) for i in range(30)]
    path, result = write(tmp_path / "t.jsonl", *lines), tmp_path / "rates.json"
    flags = ["--block-size", "512", "--cost", "kv_bytes_per_token=1e6", "--json", str(result)]
    assert main(["simulate", str(path), "chat", *flags, "--hit-rates", "9,4.1GB,50%"]) == 0
    rows = json.loads(result.read_text())
    # 6 pages are shared; the third block of each is less than a page, with its reply too.
    assert [row["num_pages"] for row in rows[:3]] == [9, 8, 3]
    assert {row["trace"] for row in rows} == {str(path), "chat"}
    for row in rows:
        assert max(row["by_policy"].values()) <= row["best_offline"] <= row["endless"]
    assert "best offline" in capsys.readouterr().out


@pytest.mark.parametrize("pool", ["0", "-1", "x", "5GBs", "0%", "nan%", ""])
def test_a_pool_that_is_none_is_refused(pool: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "chat", "--num-requests", "2", f"--hit-rates=1000,{pool}"]) != 0
    assert "is no pool; write pages (2000)" in capsys.readouterr().err
