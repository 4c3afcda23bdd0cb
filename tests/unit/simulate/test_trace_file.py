"""Trace files: what is written reads back the same; what is wrong is named by line and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyroots.errors import ConfigError
from manyroots.messages import KeepRange
from manyroots.simulate.segments import segment_tokens
from manyroots.simulate.synthetic import SYNTHETIC, synthetic_trace
from manyroots.simulate.trace import EndsBy, TraceSegment
from manyroots.simulate.trace_file import parse_line, read_trace, write_trace

GOOD: dict[str, Any] = {"arrival": 0.5, "prompt": [1, 2], "adapter": None, "output_tokens": 4}


def test_the_same_name_is_the_same_tokens_and_shorter_ones_begin_longer_ones() -> None:
    long = segment_tokens("system", 300)
    assert np.array_equal(segment_tokens("system", 120), long[:120])
    assert not np.array_equal(segment_tokens("other", 300), long)
    # Fixed for ever: a trace must mean the same in every process and release.
    assert segment_tokens("system", 4).tolist() == [92100, 61323, 128838, 26353]


@pytest.mark.parametrize("name", sorted(SYNTHETIC))
def test_made_traces_read_back_as_they_were_written(name: str, tmp_path: Path) -> None:
    trace = synthetic_trace(name, seed=1, num_requests=40)
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace
    assert len(trace) == 40
    assert list(trace) == sorted(trace, key=lambda line: line.arrival_s)
    assert synthetic_trace(name, seed=1, num_requests=40) == trace


def test_fields_left_out_have_their_defaults() -> None:
    line = parse_line(json.dumps(GOOD), "t")
    assert (line.salt, line.n, line.reply, line.ends_by) == (None, 1, None, EndsBy.LENGTH)
    assert line.prompt_tokens().tolist() == [1, 2]


def test_t13_marks_read_back_as_they_were_written(tmp_path: Path) -> None:
    asked = [{"until_token": 32, "priority": 70, "for_s": 9.5}, {"until_token": 64}]
    trace = (parse_line(json.dumps({**GOOD, "retention": asked}), "t"),)
    assert trace[0].retention is not None
    assert trace[0].retention.ranges == (KeepRange(32, 70, 9.5), KeepRange(64, 50, 300.0))
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace


def test_segments_are_put_together_to_a_prompt() -> None:
    line = parse_line(json.dumps({**GOOD, "prompt": [["a", 3], ["b", 2]]}), "t")
    assert line.prompt == (TraceSegment("a", 3), TraceSegment("b", 2))
    assert line.num_prompt_tokens == 5
    assert line.prompt_tokens()[:3].tolist() == segment_tokens("a", 3).tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrival": -1}, "arrival is -1"),
        ({"arrival": True}, "arrival is True"),
        ({"arrival": "0"}, "arrival is '0'"),
        ({"prompt": []}, "prompt must be a non-empty list"),
        ({"prompt": "text"}, "prompt must be a non-empty list"),
        ({"prompt": [1, -2]}, r"prompt\[1\] is -2"),
        ({"prompt": [1, 2**31]}, r"prompt\[1\] is 2147483648"),
        ({"prompt": [1, ["a", 2]]}, r"prompt\[1\] is \['a', 2\]"),
        ({"prompt": [["a", 2], 1]}, r"prompt\[1\] is 1"),
        ({"prompt": [["a", 0]]}, r"prompt\[0\]'s length is 0"),
        ({"prompt": [["a"]]}, r"prompt\[0\] is \['a'\]"),
        ({"adapter": 3}, "adapter is 3"),
        ({"adapter": ""}, "adapter is empty"),
        ({"salt": 3}, "salt is 3"),
        ({"output_tokens": 0}, "output_tokens is 0"),
        ({"output_tokens": 1.5}, "output_tokens is 1.5"),
        ({"n": 1000}, "n is 1000"),
        ({"reply": []}, r"reply is \[\]"),
        ({"ends_by": "eos"}, "ends_by is 'eos'"),
        ({"ends_by": []}, r"ends_by is \[\]"),
        ({"output": 4}, "unknown field 'output'"),
        ({"retention": {"until_token": 4}}, "retention must be a list"),
        ({"retention": [{"priority": 4}]}, "retention must be a list of objects with until_token"),
        ({"retention": [{"until_token": 0}]}, r"retention\[0\].until_token is 0"),
        ({"retention": [{"until_token": "4"}]}, "'until_token' of retention is '4'"),
        ({"retention": [{"until_token": 4, "till": 3}]}, "'till' of retention is 3"),
    ],
)
def test_a_bad_field_is_named_with_its_line(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps({**GOOD, **changes})}\n")
    with pytest.raises(ConfigError, match=rf"bad\.jsonl, line 3: {message}"):
        read_trace(path)


@pytest.mark.parametrize("field", sorted(GOOD))
def test_a_missing_field_is_named(field: str) -> None:
    rest = {name: value for name, value in GOOD.items() if name != field}
    with pytest.raises(ConfigError, match=f"line 7: {field} is missing"):
        parse_line(json.dumps(rest), "line 7")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no request"),
        (b"{\n", "line 1: not JSON"),
        (b"[1]\n", "line 1: expected a JSON object"),
        (b"\xff\xfe\n", "can't be read"),
        (b"[" * 100_000, "line 1: not JSON"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read_trace(tmp_path / "none.jsonl")


def test_an_unknown_name_lists_the_made_traces() -> None:
    with pytest.raises(ConfigError, match="chat, adapters, rounds, rollouts, agents"):
        synthetic_trace("chta", seed=0, num_requests=1)
