"""What chat clients and operators send and read, against a real server of a tiny model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from manyroots.cli.main import main
from tests.e2e.conftest import HEADERS, Server
from tests.helpers.patience import PATIENCE_S
from tests.helpers.tiny_server import MODEL, tiny_server

ASKED = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def tiny() -> Iterator[Server]:
    with tiny_server("--enable-log-requests") as server:
        yield server


def chat(server: Server, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": ASKED, "max_tokens": 4, "temperature": 0} | more
    return httpx.post(
        f"{server.url}/v1/chat/completions", json=body, headers=HEADERS, timeout=PATIENCE_S
    )


def num_prompt_tokens(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens"])


def test_g03_what_templates_are_told_reaches_the_engine(tiny: Server) -> None:
    """G03: a template that is told not to think writes more, and the engine computes it. An effort
    that the template does not read changes nothing."""
    plain, told = chat(tiny), chat(tiny, chat_template_kwargs={"enable_thinking": False})
    assert num_prompt_tokens(told) > num_prompt_tokens(plain)
    again = chat(tiny, reasoning_effort="low")
    assert num_prompt_tokens(again) == num_prompt_tokens(plain)
    answers = [answer.json()["choices"][0]["message"]["content"] for answer in (plain, again)]
    assert answers[0] == answers[1]


def test_g04_an_answer_is_history_as_it_came(tiny: Server) -> None:
    """G04: with null and unknown fields, usage in every chunk, and fields of other servers."""
    message = chat(tiny).json()["choices"][0]["message"]
    talk = [*ASKED, message | {"refusal": None, "annotations": [], "mood": "fine"}, *ASKED]
    second = chat(tiny, messages=talk, include_reasoning=True)
    assert num_prompt_tokens(second) > num_prompt_tokens(chat(tiny))
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = chat(tiny, messages=talk, stream=True, stream_options=options)
    lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == second.json()["usage"]["completion_tokens"]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert text == second.json()["choices"][0]["message"]["content"]


def test_g09_a_request_has_its_line(tiny: Server) -> None:
    """G09: with the counts that the caller was told."""
    usage = chat(tiny, max_tokens=3, ignore_eos=True).json()["usage"]
    [*_, last] = re.findall(r"prompt=(\d+) cached=\d+ output=(\d+) .* finish=length", tiny.log())
    assert tuple(map(int, last)) == (usage["prompt_tokens"], usage["completion_tokens"]) != (0, 0)
    assert "hello there" not in tiny.log()


def test_b01_the_load_generator_measures_a_real_server(tiny: Server, tmp_path: Path) -> None:
    """B01: every request is answered, and tokens are counted as the server counts them."""
    report, names = tmp_path / "serve.json", ("prompt", "generation")
    before = [tiny.metric(f"vllm:{name}_tokens_total") for name in names]
    flags = (
        "--requests", "6", "--prompt-words", "8-12", "--head-words", "0", "--output-len", "5-5",
        "--rates", "20", "--repeats", "1", "--api-key", "e2e-key", "--json", str(report),
    )  # fmt: skip
    assert main(["bench", "serve", "--url", tiny.url, *flags]) == 0
    after = [tiny.metric(f"vllm:{name}_tokens_total") for name in names]
    [case] = json.loads(report.read_text())["cases"]
    assert (case["requests"], case["faults"]) == (6, {})
    num_tokens = case["output_tokens_per_s"]["median"] * case["seconds"]["median"]
    assert num_tokens == pytest.approx(6 * 5, rel=0.01)
    counted = [now - then for now, then in zip(after, before, strict=True)]
    assert counted[0] > case["prompt_tokens"][0] > 0, "a first request, which is not measured, too"
    assert counted[1] > 6 * 5
    assert case["time_to_first_token_s"]["p50"]["median"] > 0
