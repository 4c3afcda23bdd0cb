"""Bars on loads (S05): on by default wherever a model is loaded, off by flag."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable

import pytest

from manyroots import LLM
from manyroots.cli.main import main
from manyroots.process.progress import Display, Progress, stage, told_to, track
from tests.e2e.conftest import running
from tests.helpers.tiny_adapters import TinyAdapters
from tests.unit.text.tiny_tokenizer import TEMPLATE


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    tiny = TinyAdapters(tmp_path_factory.mktemp("tiny"))
    (tiny.model / "chat_template.jinja").write_text(TEMPLATE)
    return tiny


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def llm(tiny: TinyAdapters, is_on: bool) -> None:
    LLM(str(tiny.model), progress_bars=is_on, num_gpu_blocks_override=64).close()


def flags(tiny: TinyAdapters, is_on: bool) -> list[str]:
    adapter = f"few={tiny.path('few')}"
    return ["--lora", adapter, "--max-tokens", "1"] + ([] if is_on else ["--no-progress-bars"])


def generate(tiny: TinyAdapters, is_on: bool) -> None:
    assert main(["generate", "hello", "--model", str(tiny.model), *flags(tiny, is_on)]) == 0


def chat(tiny: TinyAdapters, is_on: bool) -> None:
    assert main(["chat", str(tiny.model), *flags(tiny, is_on)]) == 0


@pytest.mark.parametrize("use", [llm, generate, chat])
@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("is_on", [True, False])
def test_s05_loads_show_their_progress(
    tiny: TinyAdapters,
    use: Callable[[TinyAdapters, bool], None],
    is_terminal: bool,
    is_on: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S05: in Python, `generate` and `chat`: weights, and adapters where there are some."""
    shown = FakeTerminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(sys, "stdin", io.StringIO("/exit\n"))
    use(tiny, is_on)
    text = shown.getvalue()
    if not is_on:
        assert "weights" not in text
        assert "adapters" not in text
        return
    assert "Loading weights" in text
    if use is not llm:
        assert "Checking adapters" in text
    if is_terminal:
        assert "100%" in text
    else:
        assert re.search(r"Loading weights: 0 of (\d+)\nLoading weights: \1 of \1, \d", text)


@pytest.mark.parametrize("is_on", [True, False])
def test_s05_the_server_shows_its_engines_progress(tiny: TinyAdapters, is_on: bool) -> None:
    """S05: though another process loads; and both say where the time went."""
    more = [] if is_on else ["--no-progress-bars"]
    with running(str(tiny.model), "--num-gpu-blocks-override", "64", *more) as server:
        server.wait_until_ready()
        log = server.log()
    assert ("Loading weights: 0 of " in log) == is_on
    assert re.search(r"engine ready in [\d.]+ s: process and imports [\d.]+ s, model files", log)
    assert re.search(r"ready in [\d.]+ s: engine and tokenizer", log)


def test_r07_a_stage_of_a_second_start_has_its_own_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R07: of an engine that is started again, not the hours since the first one."""
    now = 0.0
    monkeypatch.setattr("manyroots.process.progress.time.monotonic", lambda: now)
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    display = Display()
    for begin in (100.0, 5000.0):
        now = begin
        display(Progress("Loading weights", 0, 3))
        now += 2.0
        display(Progress("Loading weights", 3, 3))
    assert shown.getvalue().count("Loading weights: 3 of 3, 2.0 s") == 2


def test_what_is_told_of_a_start() -> None:
    told: list[Progress] = []
    with told_to(told.append):
        assert list(track((), total=0, label="adapters")) == []
    assert told == [], "of nothing there is no news"
    with told_to(told.append) as seconds, stage("one"):
        assert list(track("abc", total=3, label="letters")) == ["a", "b", "c"]
    assert (told[0], told[-1]) == (Progress("letters", 0, 3), Progress("letters", 3, 3))
    assert list(seconds) == ["one"]
    assert list(track("abc", total=3, label="letters")) == ["a", "b", "c"], "without a listener"
    assert len(told) <= 5
    with Display() as display:
        display(Progress("letters", 0, 3))
