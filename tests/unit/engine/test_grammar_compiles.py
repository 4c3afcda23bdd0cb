"""Requests that wait for a grammar, and delay no other request (G01)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyroots import LLM, SamplingParams, StructuredOutputsParams
from manyroots.config import ModelSettings
from manyroots.engine.grammar_compiles import load_vocabulary
from manyroots.errors import RequestError
from manyroots.grammar.cache import CompiledGrammar, GrammarCache
from manyroots.ids import AdapterName, RequestId
from manyroots.messages import (
    Abort,
    ErrorKind,
    FinishReason,
    LoadLora,
    Output,
    Submit,
    UnloadLora,
)
from tests.helpers.adapter_folders import write_adapter
from tests.helpers.patience import PATIENCE_S
from tests.unit.models.tiny import load_tiny, save_tiny
from tests.unit.text.tiny_tokenizer import EOS as END
from tests.unit.text.tiny_tokenizer import tiny_backend

EOS = 257


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    save_tiny(tmp_path, "llama", vocab_size=300, eos_token_id=EOS)
    tiny_backend().save(str(tmp_path / "tokenizer.json"))
    write_adapter(tmp_path / "adapter", load_tiny(tmp_path).adapter_targets())
    with LLM(str(tmp_path), dtype="float32", enable_lora=True) as made:
        yield made


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, no grammar is compiled."""
    opened, compile_now = threading.Event(), GrammarCache.compile

    def later(self: GrammarCache, params: StructuredOutputsParams) -> CompiledGrammar:
        opened.wait(PATIENCE_S)
        return compile_now(self, params)

    monkeypatch.setattr(GrammarCache, "compile", later)
    return opened


def submit(number: int, choice: str | None, adapter: str | None = None) -> Submit:
    wanted = None if choice is None else StructuredOutputsParams(choice=(choice,))
    sampling = SamplingParams(temperature=0, max_tokens=8, structured_outputs=wanted)
    name = None if adapter is None else AdapterName(adapter)
    return Submit(RequestId(number), [1, 2, 3], None, sampling, number, (EOS,), name)


def load(loop: Any, number: int, name: str, folder: Path) -> None:
    loop.handle(LoadLora(number, AdapterName(name), str(folder / "adapter"), False, False))
    while loop.is_reading:
        loop.wait_for_read(PATIENCE_S)
        loop.step()
    [reply] = loop.take_replies()
    assert reply.error is None, reply.error


def run(loop: Any, until: Any) -> list[Output]:
    outputs: list[Output] = []
    deadline = time.monotonic() + PATIENCE_S
    while not until(outputs) and time.monotonic() < deadline:
        if loop.has_work:
            outputs += loop.step()
        else:
            time.sleep(0.001)
    return outputs


def ended(*numbers: int) -> Any:
    def all_of_them(outputs: list[Output]) -> bool:
        return {o.request_id for o in outputs if o.finish_reason is not None} >= set(numbers)

    return all_of_them


def test_g01_a_grammar_that_is_compiled_holds_up_nobody(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G01: others begin and end meanwhile; those that want the same grammar wait for one."""
    gate, compiled = threading.Event(), []
    compile_now = GrammarCache.compile

    def slowly(self: GrammarCache, params: StructuredOutputsParams) -> CompiledGrammar:
        gate.wait(PATIENCE_S)
        compiled.append(params)
        return compile_now(self, params)

    monkeypatch.setattr(GrammarCache, "compile", slowly)
    loop = llm._loop
    for made in (submit(1, "abc"), submit(2, "abc"), submit(3, "gone"), submit(4, None)):
        loop.handle(made)
    outputs = run(loop, ended(4))
    assert {output.request_id for output in outputs} == {4}
    assert not compiled
    loop.handle(Abort([RequestId(3)]))
    [aborted] = run(loop, ended(3))
    assert aborted.finish_reason is FinishReason.ABORT, "a caller that aborts all waits for it"
    gate.set()
    outputs = run(loop, ended(1, 2))
    assert {o.request_id for o in outputs} == {1, 2}
    assert len(compiled) == 2, "one for both, and one that no request needs any more"
    for number in (1, 2):
        text = bytes(t for o in outputs if o.request_id == number for t in o.tokens if t < 256)
        assert text == b"abc"
    loop.handle(submit(5, "abc"))
    run(loop, ended(5))
    assert len(compiled) == 2, "found again"
    assert not loop.preparation._compiles._held


def test_g01_n13_who_waits_for_a_grammar_holds_the_adapter_it_came_for(
    llm: LLM, tmp_path: Path, gate: threading.Event
) -> None:
    """N13: an unload that arrives after a request takes nothing from it, whatever it waits for."""
    loop: Any = llm._loop
    load(loop, 1, "a", tmp_path)
    for made in (submit(1, "abc", "a"), submit(2, "gone", "a")):
        loop.handle(made)
    loop.handle(UnloadLora(2, AdapterName("a")))
    loop.handle(submit(3, "abc", "a"))
    [late] = run(loop, ended(3))
    assert late.error_kind is ErrorKind.NOT_FOUND, "this one came after it"
    [reply] = loop.take_replies()
    assert reply.num_requests == 2
    loop.handle(Abort([RequestId(2)]))
    run(loop, ended(2))
    gate.set()
    outputs = run(loop, ended(1))
    assert outputs[-1].finish_reason is FinishReason.STOP, outputs[-1].error
    assert bytes(t for o in outputs for t in o.tokens if t < 256) == b"abc"
    while loop.has_work:
        loop.step()
    registry = loop._scheduler.adapters.registry
    assert not registry.open_holds
    assert not registry.contents, "it was unloaded, and no request holds it any more"
    assert not loop.preparation.waiting


def test_g01_a_grammar_that_cannot_be_lets_go_of_the_adapter(llm: LLM, tmp_path: Path) -> None:
    loop: Any = llm._loop
    load(loop, 1, "a", tmp_path)
    wanted = StructuredOutputsParams(grammar="start: nowhere")
    made = submit(1, None, "a")
    loop.handle(replace(made, sampling=replace(made.sampling, structured_outputs=wanted)))
    loop.handle(UnloadLora(2, AdapterName("a")))
    [failed] = run(loop, ended(1))
    assert "nowhere" in str(failed.error)
    assert not loop._scheduler.adapters.registry.contents


def test_g01_a_grammar_that_cannot_be_is_one_requests_end(llm: LLM) -> None:
    loop = llm._loop
    wanted = StructuredOutputsParams(grammar="start: nowhere")
    sampling = SamplingParams(max_tokens=4, structured_outputs=wanted)
    bad = submit(1, "x")
    loop.handle(Submit(bad.request_id, [1], bad.salt, sampling, 1, (EOS,), None))
    loop.handle(submit(2, None))
    outputs = run(loop, ended(1, 2))
    [failed] = [output for output in outputs if output.request_id == 1]
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error_kind is ErrorKind.REQUEST
    assert "nowhere" in str(failed.error)


def test_g01_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", vocab_size=300, eos_token_id=None)
    tiny_backend().save(str(tmp_path / "tokenizer.json"))
    wanted = SamplingParams(structured_outputs=StructuredOutputsParams(choice=("a",)))
    with LLM(str(tmp_path), dtype="float32") as llm, pytest.raises(RequestError, match="no token"):
        llm.generate(["x"], wanted)


def test_a_shape_ends_with_whatever_ends_a_text(tmp_path: Path) -> None:
    """The model's own ends and the tokenizer's, as without a shape."""
    tiny_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    settings = ModelSettings(model=str(tmp_path))
    for vocab_size, ends in ((300, (7, EOS)), (257, (7,))):
        assert load_vocabulary(settings, str(tmp_path), vocab_size, (7,)).eos_ids == ends
