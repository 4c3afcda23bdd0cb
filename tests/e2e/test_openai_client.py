"""The official OpenAI client against the real server and the default model (S01, S04, S06).

Servers that are ended or killed have a tiny model: they start in half the time.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.e2e.conftest import CONTEXT, HEADERS, MAX_ALIVE, START_LIMIT_S, Server, running
from tests.helpers.patience import PATIENCE_S
from tests.helpers.tiny_server import MODEL as TINY
from tests.helpers.tiny_server import starting_server

STORY = "Once upon a time, in a small village by the sea, there lived an old fisherman who"
USER = ChatCompletionUserMessageParam(role="user", content="Name three colours.")
LONG = 400
"""Tokens of an answer that a server of slow steps never ends in time."""


def complete(client: openai.OpenAI, model: str, **fields: Any) -> Any:
    create: Any = client.completions.create  # its overloads can't follow keyword arguments
    return create(**{"model": model, "prompt": STORY, "max_tokens": 8, "temperature": 0} | fields)


def text(client: openai.OpenAI, model: str, **fields: Any) -> str:
    return str(complete(client, model, **fields).choices[0].text)


def test_models(client: openai.OpenAI, model: str) -> None:
    """S01"""
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError, match="gpt-99"):
        client.models.retrieve("gpt-99")


def test_completion_and_usage(client: openai.OpenAI, model: str) -> None:
    """S01"""
    answer = complete(client, model)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_streamed_completion_equals_the_whole_one(client: openai.OpenAI, model: str) -> None:
    """S01"""
    chunks = list(complete(client, model, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert streamed == text(client, model)
    assert chunks[-1].usage.completion_tokens == 8
    assert not chunks[-1].choices


def test_prompts_as_lists_and_as_tokens(server: Server, client: openai.OpenAI, model: str) -> None:
    """S01"""
    tokens = httpx.post(
        f"{server.url}/tokenize",
        json={"prompt": STORY},
        headers=HEADERS,
        timeout=PATIENCE_S,
    ).json()["tokens"]
    expected = text(client, model)
    assert text(client, model, prompt=tokens) == expected
    both = complete(client, model, prompt=[STORY, "The capital of France is"])
    assert both.choices[0].text == expected
    assert [choice.index for choice in both.choices] == [0, 1]


def test_chat_whole_and_streamed(client: openai.OpenAI, model: str) -> None:
    """S01"""
    whole = client.chat.completions.create(
        model=model, messages=[USER], max_completion_tokens=12, temperature=0
    )
    assert whole.choices[0].message.role == "assistant"
    stream = client.chat.completions.create(
        model=model, messages=[USER], max_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    content = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert content == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_cached_tokens_are_reported_the_second_time(client: openai.OpenAI, model: str) -> None:
    """S01, and N21: another tenant's salt shares nothing."""
    prompt = "A sentence that nobody has sent before. " * 8

    def cached(**extra: Any) -> int:
        usage = complete(client, model, prompt=prompt, max_tokens=1, extra_body=extra).usage
        return int(usage.prompt_tokens_details.cached_tokens)

    assert cached() == 0
    assert cached() >= 32
    assert cached(cache_salt="tenant-a") == 0
    assert cached(cache_salt="tenant-a") >= 32
    assert cached(cache_salt="tenant-b") == 0


def test_n_choices(client: openai.OpenAI, model: str) -> None:
    """S01: different choices of one seed, and the same again."""
    first, second = (
        [c.text for c in complete(client, model, n=3, temperature=1.0, seed=11).choices]
        for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == 3


def test_a_seed_decides(client: openai.OpenAI, model: str) -> None:
    """S01"""
    texts = [text(client, model, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_stop_strings_and_tokens(client: openai.OpenAI, model: str) -> None:
    """S01"""
    whole = text(client, model, max_tokens=12)
    stop = whole[5:9]
    cut = complete(client, model, max_tokens=12, stop=[stop])
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    kept = text(
        client, model, max_tokens=12, stop=stop, extra_body={"include_stop_str_in_output": True}
    )
    assert kept == whole[: whole.index(stop) + len(stop)]
    ids = complete(client, model, extra_body={"return_token_ids": True}).choices[0].token_ids
    by_id = complete(client, model, extra_body={"stop_token_ids": [ids[3]]}).choices[0]
    assert by_id.finish_reason == "stop"
    assert by_id.stop_reason == ids[3]


def test_min_tokens_and_ignore_eos(client: openai.OpenAI, model: str) -> None:
    """S01"""

    def answer(**extra: Any) -> Any:
        return client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Say only: ok"}], max_tokens=12,
            temperature=0, logit_bias={"2": 100}, extra_body=extra,
        )  # fmt: skip

    assert answer().usage.completion_tokens == 1, "the end of text is what the bias asks for"
    assert answer(min_tokens=5).usage.completion_tokens == 6
    assert answer(ignore_eos=True).usage.completion_tokens == 12


def test_logprobs(client: openai.OpenAI, model: str) -> None:
    """S01"""
    logprobs = complete(client, model, logprobs=3).choices[0].logprobs
    assert "".join(logprobs.tokens) == text(client, model)
    assert all(len(top) >= 3 for top in logprobs.top_logprobs)
    assert logprobs.text_offset[0] == 0
    chat = client.chat.completions.create(
        model=model, messages=[USER], max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    for entry in content:
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob, abs=1e-4)
        assert bytes(entry.bytes or []).decode() == entry.token


def test_prompt_logprobs_and_echo(client: openai.OpenAI, model: str) -> None:
    """S01: the prompt's score is the same by both ways to ask for it."""
    scored = complete(client, model, max_tokens=1, extra_body={"prompt_logprobs": 0}).choices[0]
    assert scored.prompt_logprobs[0] is None
    by_extension = [next(iter(p.values()))["logprob"] for p in scored.prompt_logprobs[1:]]
    echoed = complete(client, model, max_tokens=1, logprobs=0, echo=True).choices[0]
    assert echoed.text.startswith(STORY)
    by_echo = echoed.logprobs.token_logprobs
    assert by_echo[0] is None
    assert by_echo[1:-1] == pytest.approx(by_extension, abs=1e-4)
    assert all(math.isfinite(value) and value <= 0 for value in by_extension)


def test_logit_bias_forbids_and_forces(client: openai.OpenAI, model: str) -> None:
    """S01"""
    ids = complete(client, model, extra_body={"return_token_ids": True}).choices[0].token_ids
    forbidden = complete(
        client, model, logit_bias={str(ids[0]): -100}, extra_body={"return_token_ids": True}
    )
    assert forbidden.choices[0].token_ids[0] != ids[0]
    forced = complete(client, model, logit_bias={"42": 100}, extra_body={"return_token_ids": True})
    assert forced.choices[0].token_ids == [42] * 8


def test_penalties_and_filters(client: openai.OpenAI, model: str) -> None:
    """S01: each option changes what it should."""
    loop = "one two one two one two one two one two one two"
    plain = text(client, model, prompt=loop, max_tokens=4)
    assert text(client, model, prompt=loop, max_tokens=4, frequency_penalty=2.0) != plain
    assert text(client, model, prompt=loop, max_tokens=4, presence_penalty=2.0) != plain
    penalty = {"repetition_penalty": 2.0}
    assert text(client, model, prompt=loop, max_tokens=4, extra_body=penalty) != plain
    greedy = text(client, model, max_tokens=4)
    for narrow in ({"top_k": 1}, {"min_p": 1.0}):
        drawn = text(client, model, max_tokens=4, temperature=1.0, extra_body=narrow)
        assert drawn == greedy, "only the likeliest token is left"
    assert text(client, model, max_tokens=4, temperature=1.0, top_p=1e-6) == greedy


def test_the_longest_context_is_served_and_no_more(client: openai.OpenAI, model: str) -> None:
    prompt = [100] * (CONTEXT - 2)
    assert complete(client, model, prompt=prompt, max_tokens=2).usage.completion_tokens == 2
    assert complete(client, model, prompt=prompt, max_tokens=3).usage.completion_tokens == 2
    with pytest.raises(openai.BadRequestError, match=f"{CONTEXT}"):
        complete(client, model, prompt=[100] * CONTEXT, max_tokens=1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_pages(server: Server, model: str, stream: bool) -> None:
    """S06"""
    server.wait_until_idle()
    # Stories that end by themselves would free their pages, too.
    fields: dict[str, Any] = {
        "model": model, "prompt": STORY, "max_tokens": 900, "n": 3, "ignore_eos": True,
    }  # fmt: skip
    if stream:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=fields | {"stream": True},
            headers=HEADERS, timeout=PATIENCE_S,
        ) as response:  # fmt: skip
            lines = response.iter_lines()  # kept: httpx hangs up when it is dropped
            assert next(lines).startswith("data: ")
            server.wait_for("manyroots:pages_held", lambda value: value > 0)
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{server.url}/v1/completions", json=fields, headers=HEADERS,
                timeout=httpx.Timeout(PATIENCE_S, read=1.0),
            )  # fmt: skip
    server.wait_until_idle()


def test_a_wrong_key_is_a_401(server: Server) -> None:
    """R05"""
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    assert httpx.get(f"{server.url}/v1/models", timeout=PATIENCE_S).status_code == 401
    for path in ("/health", "/ready", "/metrics"):
        assert httpx.get(server.url + path, timeout=PATIENCE_S).status_code == 200


def test_metrics_and_version(server: Server, client: openai.OpenAI, model: str) -> None:
    """S04"""
    before = server.metric("vllm:generation_tokens_total")
    complete(client, model)
    assert server.metric("vllm:generation_tokens_total") == before + 8
    assert server.metric("vllm:prefix_cache_queries_total") > 0
    assert server.metric("vllm:time_to_first_token_seconds_count") > 0
    assert server.get("/version").json()["version"]


def test_a_full_queue_is_a_429(server: Server, client: openai.OpenAI, model: str) -> None:
    """S06"""
    server.wait_until_idle()
    stream = complete(
        client, model, max_tokens=500, n=MAX_ALIVE, stream=True, extra_body={"ignore_eos": True}
    )
    try:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as caught:
            complete(client, model)
        assert int(caught.value.response.headers["retry-after"]) >= 1
    finally:
        stream.close()
    server.wait_until_idle()
    assert complete(client, model)


def test_a_greedy_answer_does_not_depend_on_company(client: openai.OpenAI, model: str) -> None:
    alone = text(client, model)
    together: list[str] = []
    threads = [
        threading.Thread(target=lambda: together.append(text(client, model))) for _ in range(3)
    ] + [
        threading.Thread(target=text, args=(client, model), kwargs={"prompt": f"Number {i} is"})
        for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [alone] * 3


def test_sigterm_drains() -> None:
    """S06: nothing new is taken, and what runs may finish."""
    with starting_server("--drain-timeout-s", "3600", is_slow=True) as server:
        server.wait_until_ready()
        client = server.client()
        options: dict[str, Any] = {"stream": True, "extra_body": {"ignore_eos": True}}
        short = iter(complete(client, TINY, max_tokens=8, **options))
        long = complete(client, TINY, max_tokens=LONG, **options)
        next(short)
        next(iter(long))
        server.signal(signal.SIGTERM)
        while server.status("/ready") != 503:  # it ends in any case
            time.sleep(0.01)
        with pytest.raises(openai.InternalServerError) as caught:
            complete(client, TINY)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"]
        assert list(short)[-1].choices[0].finish_reason == "length"
        assert server.process.poll() is None
        long.close()  # the last one that it waits for
        assert server.process.wait(PATIENCE_S) == 0


def test_sigterm_cuts_what_takes_too_long() -> None:
    """S06: with an error that says so."""
    with starting_server("--drain-timeout-s", "0.1", is_slow=True) as server:
        server.wait_until_ready()
        options: dict[str, Any] = {"stream": True, "extra_body": {"ignore_eos": True}}
        long = iter(complete(server.client(), TINY, max_tokens=LONG, **options))
        next(long)
        server.signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="server is shutting down"):
            list(long)
        assert server.process.wait(PATIENCE_S) == 0
        assert "leaked" not in server.log()  # what triton's bindings say of a tidy end


@pytest.mark.skipif(sys.platform != "linux", reason="finds the engine through /proc")
def test_a_dead_engine_fails_its_requests_and_is_started_again() -> None:
    """R04, R07, S04: told while it is down, served after, and at the second death the end."""
    with starting_server("--max-engine-restarts", "1", is_slow=True) as server:
        assert not was_healthy_while_loading(server)
        client = server.client()

        def kill_in_mid_stream() -> None:
            options: dict[str, Any] = {"stream": True, "extra_body": {"ignore_eos": True}}
            chunks = iter(complete(client, TINY, max_tokens=LONG, **options))
            next(chunks)
            [engine] = server.children()
            os.kill(engine, signal.SIGKILL)
            with pytest.raises(openai.APIError, match="killed by SIGKILL"):
                list(chunks)

        kill_in_mid_stream()
        with next_engine_held(server):
            for path in ("/health", "/ready", "/v1/models"):
                assert server.status(path) == 503
            health = httpx.get(f"{server.url}/health", timeout=PATIENCE_S).json()
            assert health["status"] == "restarting"
            assert "engine" in health["progress"]["stage"]
            assert server.status("/live") == 200
            assert (
                server.metric("manyroots:engine_up") == server.metric("manyroots:pages_held") == 0
            )
            with pytest.raises(openai.InternalServerError, match="started again"):
                complete(client, TINY)
        server.wait_until_ready()
        answer = complete(client, TINY, max_tokens=2, extra_body={"ignore_eos": True})
        assert answer.choices[0].finish_reason == "length"
        assert server.metric("manyroots:engine_restarts_total") == 1
        kill_in_mid_stream()
        assert server.process.wait(PATIENCE_S) == 1
        assert server.log().count("killed by SIGKILL") >= 2
        assert "starting the engine again in 1 s (1 of 1 in a row)" in server.log()
        assert "the engine is back, " in server.log()


@contextlib.contextmanager
def next_engine_held(server: Server) -> Iterator[None]:
    """The engine that is started after one that died is stopped meanwhile, so that it is not back
    before all was asked."""
    deadline = time.monotonic() + PATIENCE_S
    while not (started := server.children()):
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.02)
    os.kill(started[0], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(started[0], signal.SIGCONT)


def was_healthy_while_loading(server: Server) -> bool:
    """Waits until it is ready."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            was_healthy = server.status("/health") == 200
            if server.status("/ready") == 200:
                return False
            if was_healthy:
                return True
        time.sleep(0.05)
    pytest.fail(f"the server was not ready in {START_LIMIT_S} s:\n{server.log()}")


def test_a_model_that_does_not_exist_ends_the_server() -> None:
    with running("/nonexistent/model") as server:
        assert server.process.wait(PATIENCE_S) not in (0, None)
        assert "/nonexistent/model" in server.log()
