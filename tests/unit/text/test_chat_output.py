"""A completion's text read as reasoning, content and tool calls (G02, G03)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from manyroots.errors import ConfigError
from manyroots.text.chat_output import ContentDelta, ToolCallArguments, ToolCallBegins
from manyroots.text.formats.choice import choose_format
from manyroots.text.tools import NO_TOOLS, check_tools
from tests.unit.text.recorded_answers import QWEN, RECORDED, TOOLS, Recorded, joined, pieces, plain
from tests.unit.text.recorded_slips import SLIPS

ALL = RECORDED + SLIPS


@pytest.mark.parametrize("recorded", ALL, ids=lambda recorded: recorded.name)
def test_g02_a_recorded_text_means_what_it_says(recorded: Recorded) -> None:
    output = recorded.output()
    events = output.push(recorded.text) + output.finish()
    assert plain(output.answer) == (recorded.reasoning, recorded.content, recorded.calls)
    assert joined(events) == output.answer


@pytest.mark.parametrize("recorded", ALL, ids=lambda recorded: recorded.name)
def test_g02_streamed_equals_whole_whatever_the_pieces(recorded: Recorded) -> None:
    rng = random.Random(recorded.name)
    cuts = [list(recorded.text)] + [pieces(recorded.text, rng) for _ in range(30)]
    for parts in cuts:
        output = recorded.output()
        events = [event for part in parts for event in output.push(part)] + output.finish()
        assert plain(joined(events)) == (recorded.reasoning, recorded.content, recorded.calls)
        assert joined(events) == output.answer, parts


def test_g02_a_name_is_told_before_the_arguments_are_whole() -> None:
    output = choose_format(None).output(check_tools(TOOLS, "auto"))
    [begins] = output.push('<tool_call>{"name": "now", "argu')
    assert isinstance(begins, ToolCallBegins)
    assert begins.name == "now"
    assert output.push('ments": {"a": ') == [ToolCallArguments(0, '{"a": ')]


def test_text_without_tools_or_reasoning_is_passed_on_as_it_is() -> None:
    output = choose_format(None).output(NO_TOOLS)
    assert output.push(f" {QWEN}\n") == [ContentDelta(f" {QWEN}\n")]
    assert output.finish() == []


def test_one_call_is_all_that_is_left_without_parallel_calls() -> None:
    output = choose_format(None).output(check_tools(TOOLS, "auto", parallel=False))
    events = output.push(QWEN * 2) + output.finish()
    assert len(joined(events).tool_calls) == 1
    assert plain(joined(events))[2] == [("get_weather", '{"city": "Oslo"}')]


@pytest.mark.parametrize(
    "recorded", [r for r in RECORDED if r.calls and not r.tools], ids=lambda r: r.name
)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_g02_a_forced_call_cut_short_is_never_content(recorded: Recorded, choice: Any) -> None:
    """However short the text is cut, marks of calls are not shown."""
    chosen = choose_format(None, recorded.parser, recorded.reasoning_parser)
    use = check_tools(TOOLS, choice)
    for end in range(len(recorded.text)):
        output = chosen.output(use, prompt=recorded.prompt)
        events = output.push(recorded.text[:end]) + output.finish()
        assert not [event for event in events if isinstance(event, ContentDelta)]
        assert output.answer.content is None


def test_an_answer_that_goes_on_keeps_the_space_in_front() -> None:
    thinks = choose_format("{{ '</think>' }}")
    output = thinks.output(check_tools(TOOLS, "auto"), prompt="I am", is_continued=True)
    assert joined(output.push(" well ") + output.finish()).content == " well "


def test_an_unknown_parser_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"--tool-call-parser is 'x'; choose one of .*hermes"):
        choose_format(None, "x")
    with pytest.raises(ConfigError, match=r"--reasoning-parser is 'x'; choose one of .*qwen3"):
        choose_format(None, None, "x")
