"""Servers that are not ours: what they lack is told, and never guessed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from manyroots.conformance import client as client_module
from manyroots.conformance.client import ConformanceClient, Party
from manyroots.conformance.features import look_at
from manyroots.conformance.judge import Judge, distance
from manyroots.conformance.kit import ConformanceSettings, run_kit
from manyroots.conformance.prompts import FreshPrompts
from manyroots.conformance.report import Verdict
from manyroots.errors import ConfigError

Answering = Callable[[dict[str, Any]], dict[str, Any]]


def vllm_like(body: dict[str, Any]) -> dict[str, Any]:
    top = [{"a": -0.1, "b": -2.5}]
    logprobs = {"tokens": ["a"], "token_logprobs": [-0.1], "top_logprobs": top}
    usage = {"prompt_tokens": len(body["prompt"].split()), "prompt_tokens_details": None}
    return {"choices": [{"text": "a", "logprobs": logprobs}], "usage": usage}


def llama_cpp_like(body: dict[str, Any]) -> dict[str, Any]:
    top = [{"id": 1, "token": "a", "logprob": -0.1}, {"id": 2, "token": "b", "logprob": -2.5}]
    logprobs = {"content": [{"id": 1, "token": "a", "logprob": -0.1, "top_logprobs": top}]}
    usage = {"prompt_tokens": len(body["prompt"].split())}
    return {
        "choices": [{"text": "a", "logprobs": logprobs}], "usage": usage,
        "timings": {"cache_n": 3},
    }  # fmt: skip


def bare(body: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"text": "a"}]}


class FakeServer:
    """One model, served through httpx' own transport."""

    def __init__(self, answer: Answering, pages: dict[str, Any]) -> None:
        self._answer, self._pages = answer, pages
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/completions":
            self.bodies.append(json.loads(request.content))
            return httpx.Response(200, json=self._answer(self.bodies[-1]))
        found = self._pages.get(request.url.path)
        return httpx.Response(404) if found is None else httpx.Response(200, json=found)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeServer]:
    real = httpx.Client

    def serve(answer: Answering, **pages: Any) -> FakeServer:
        listed = {"/v1/models": {"data": [{"id": "m"}]}}
        server = FakeServer(answer, listed | {f"/{path}": page for path, page in pages.items()})
        transport = httpx.MockTransport(server)
        monkeypatch.setattr(
            client_module.httpx, "Client", lambda **given: real(transport=transport, **given)
        )
        return server

    return serve


def whys(report: dict[str, Any]) -> str:
    assert {row["verdict"] for row in report["rows"]} == {"not judged"}
    return " ".join(finding["why"] for row in report["rows"] for finding in row["findings"])


def test_logprobs_of_completions_and_of_llama_cpp_are_read_alike(
    serve: Callable[..., FakeServer],
) -> None:
    answers = []
    for answer in (vllm_like, llama_cpp_like):
        serve(answer)
        answers.append(ConformanceClient("http://server/v1/").ask(Party("", "m"), "one two"))
    assert answers[0].top == answers[1].top
    assert distance(*answers) == 0.0
    assert [answer.num_cached_tokens for answer in answers] == [None, 3]


@pytest.mark.parametrize("answer", [vllm_like, bare])
def test_a_server_without_features_is_not_judged(
    serve: Callable[..., FakeServer], answer: Answering
) -> None:
    serve(answer)
    report = run_kit(ConformanceSettings(url="http://server"))
    assert report["exit_code"] == 2
    told = whys(report)
    for reason in ("no adapter is served", "no /openapi.json", "--api-key", "--folders"):
        assert reason in told
    assert report["calibration"]["cached_tokens"] == "the server tells no cached_tokens"


def test_adapters_of_llama_cpp_are_chosen_by_number(serve: Callable[..., FakeServer]) -> None:
    """Each in its own request, the others off; and nothing is cached where nothing is found."""
    listed = {"lora-adapters": [{"id": 0}, {"id": 1}]}
    props = {"props": {"default_generation_settings": {"n_ctx": 512}}}
    server = serve(llama_cpp_like, **listed, **props)
    report = run_kit(ConformanceSettings(url="http://server", only=frozenset({"adapters"})))
    assert report["rows"][0]["pair"] == "base -> adapter 0"
    sent = [body["lora"] for body in server.bodies if "lora" in body]
    assert [{"id": 0, "scale": 1.0}, {"id": 1, "scale": 0.0}] in sent
    assert "is the prefix cache off" in whys(report)


def test_a_salt_that_the_server_does_not_declare_is_not_held_against_it(
    serve: Callable[..., FakeServer],
) -> None:
    serve(vllm_like, **{"openapi.json": {"paths": {}}})
    report = run_kit(ConformanceSettings(url="http://server", only=frozenset({"salts"})))
    assert "no cache_salt" in whys(report)


def test_a_prompt_that_its_own_party_does_not_find_again_judges_nothing(
    serve: Callable[..., FakeServer],
) -> None:
    """As where a page is longer than the prompt: that nothing is found is then no sign."""
    seen: set[str] = set()
    pages = {"are short": True}

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        found = 60 if body["prompt"] in seen and pages["are short"] else 0
        seen.add(body["prompt"])
        details = {"cached_tokens": found}
        usage = {"prompt_tokens": 64, "prompt_tokens_details": details}
        return {"choices": [{"text": "a"}], "usage": usage}

    serve(answer)
    client, prompts = ConformanceClient("http://server"), FreshPrompts(1, 64)
    party = Party("", "m")
    features = look_at(client, None, adapters={}, folders=(), salts=None)
    judge = Judge(client, prompts, features)
    judge.calibrate([party])
    for are_short, expected in ((True, Verdict.APART), (False, Verdict.NOT_JUDGED)):
        pages["are short"] = are_short
        prompt = prompts.draw()
        got = client.ask(party, prompt)
        assert judge.by_cached(party, prompt, got).verdict is expected
    pages["are short"] = True
    assert judge.by_cached(party, prompt, client.ask(party, prompt)).verdict is Verdict.LEAK


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "server:8000"}, "must be like http"),
        ({"url": "http://server", "rounds": 3}, "--rounds is 3"),
        ({"url": "http://server", "only": frozenset({"salt"})}, "--only has salt; choose of"),
        ({"url": "http://server", "prompt_tokens": 8}, "--prompt-tokens is 8"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_kit(ConformanceSettings(**settings))
