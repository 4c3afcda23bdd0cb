"""Serving: overload, disconnects, phases, keys, and the small routes (S04, S06, R04, R05)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from manyroots.messages import Output
from manyroots.process.progress import Progress
from tests.helpers.patience import PATIENCE_S
from tests.unit.api.fake_engine import FakeEngine, script
from tests.unit.api.harness import Harness, error_of, events
from tests.unit.text.tiny_tokenizer import BOS, EOS, TEMPLATE

pytestmark = pytest.mark.anyio


def held(**settings: Any) -> Harness:
    """A server whose engine gives nothing until its gate is opened."""
    harness = Harness(**settings)
    harness.engine.gate.clear()
    return harness


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_goes_away_aborts_its_sequences(stream: bool, n: int) -> None:
    """S06"""
    harness = held()
    body = {"model": "tiny", "prompt": "ab", "n": n, "stream": stream}
    async with harness.connected("/v1/completions", body):
        await until(lambda: len(harness.engine.running) == n)
        assert harness.state.service.concurrency.num_alive == n
    assert len(harness.engine.aborted) == n
    assert not harness.engine.running
    assert harness.state.service.concurrency.num_alive == 0


async def test_a_client_that_goes_away_in_mid_stream_aborts_too() -> None:
    """S06"""
    harness = Harness()
    body = {"model": "tiny", "prompt": "ab", "stream": True, "max_tokens": 500}
    async with harness.connected("/v1/completions", body) as connection:
        for _ in range(3):
            await connection.sent.get()
        harness.engine.gate.clear()
    assert len(harness.engine.aborted) == 1


async def test_a_full_queue_is_a_429_for_the_whole_request() -> None:
    """S06: four running and two waiting are allowed; nothing is admitted in part."""
    harness = held(max_queued_requests=2)
    body = {"model": "tiny", "prompt": "ab", "n": 4, "max_tokens": 1}
    async with harness.connected("/v1/completions", body):
        await until(lambda: len(harness.engine.running) == 4)
        response = await harness.complete(n=3)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert error_of(response)["code"] == "queue_full"
        assert len(harness.engine.running) == 4
        harness.engine.gate.set()
        assert (await harness.complete(n=2)).status_code == 200


async def test_a_refused_request_gives_its_slots_back() -> None:
    harness = Harness(max_queued_requests=0)
    for _ in range(10):
        assert (await harness.complete("", n=4)).status_code == 400
        assert (await harness.chat("x" * 600, n=4)).status_code == 400
    assert harness.state.service.concurrency.num_alive == 0


async def test_before_the_model_is_loaded() -> None:
    """S04: live, but it can't answer yet, and says how far it is."""
    harness = Harness(loaded=False)
    harness.engine.progress = Progress("Loading weights", 3, 10)
    assert (await harness.get("/live")).status_code == 200
    for path in ("/health", "/ready"):
        response = await harness.get(path)
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert response.json() == {
            "status": "loading",
            "progress": {"stage": "Loading weights", "done": 3, "total": 10},
        }
    assert (await harness.get("/metrics")).status_code == 200
    for response in (await harness.complete(), await harness.get("/v1/models")):
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert "loading" in error_of(response)["message"]


async def test_while_draining() -> None:
    """S06: nothing new; what runs goes on."""
    harness = held()
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 2}
    async with harness.connected("/v1/completions", body) as connection:
        await until(lambda: harness.engine.running)
        assert "connection" not in (await harness.get("/ready")).headers
        harness.state.is_draining = True
        assert (await harness.get("/ready")).status_code == 503
        assert (await harness.get("/health")).status_code == 200
        response = await harness.complete()
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert response.headers["connection"] == "close"  # another server has the next one
        harness.engine.gate.set()
        start = await connection.sent.get()
        assert start["status"] == 200
        assert (b"connection", b"close") in start["headers"]  # of what had begun before, too


async def test_a_dead_engine_fails_requests_and_says_so() -> None:
    """R04, S04"""
    harness = held()
    plain = asyncio.create_task(harness.complete())
    streamed = asyncio.create_task(harness.complete(stream=True))
    await until(lambda: len(harness.engine.running) == 2)
    await harness.engine.close()
    assert (await plain).status_code == 503
    assert (await streamed).status_code == 503, "it had not begun"
    assert error_of(await streamed)["code"] == "unavailable"
    for path in ("/health", "/ready", "/v1/models"):
        assert (await harness.get(path)).status_code == 503
    assert (await harness.get("/live")).status_code == 200
    assert (await harness.complete()).status_code == 503
    assert (await harness.get("/version")).status_code == 200, "it keeps answering"


async def test_while_its_engine_is_started_again() -> None:
    """S04, R07: nothing is answered, and the metrics say so."""
    harness = Harness()
    assert 'manyroots:engine_up{model_name="tiny"} 1.0' in (await harness.get("/metrics")).text
    harness.engine.is_alive, harness.engine.num_restarts = False, 2
    for path in ("/health", "/ready"):
        response = await harness.get(path)
        assert (response.status_code, response.json()) == (503, {"status": "restarting"})
    assert (await harness.get("/live")).status_code == 200
    for response in (await harness.complete(), await harness.get("/v1/models")):
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert "started again" in error_of(response)["message"]
    text = (await harness.get("/metrics")).text
    assert 'manyroots:engine_up{model_name="tiny"} 0.0' in text
    assert 'manyroots:engine_restarts_total{model_name="tiny"} 2.0' in text


KEY = "sécret-κλειδί"


@pytest.mark.parametrize("path", ["/v1/models", "/load", "/version", "/nope", "/health/"])
async def test_every_route_but_health_needs_the_key(path: str) -> None:
    """R05"""
    harness = Harness(api_key=KEY)
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {KEY}".encode()},
        {"authorization": KEY.encode()},
        {"authorization": "Bearer "},
        {"authorization": b"Bearer \xff\xfe"},
        {"host": "x/health"},
        {"host": "evil.example/health?"},
    ):
        response = await harness.get(path, headers=headers)
        assert response.status_code == 401
        assert error_of(response)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    good = await harness.get(path, headers={"authorization": f"Bearer {KEY}".encode()})
    assert good.status_code == (404 if path in ("/nope", "/health/") else 200)


async def test_health_and_ready_need_no_key() -> None:
    harness = Harness(api_key=KEY)
    for path in ("/live", "/health", "/ready"):
        assert (await harness.get(path)).status_code == 200


async def test_a_sane_request_id_is_echoed_and_inside_ids_are_our_own() -> None:
    harness = Harness()
    sane = [await harness.get("/version", headers={"x-request-id": "abc-1"}) for _ in range(2)]
    assert [response.headers["x-request-id"] for response in sane] == ["abc-1", "abc-1"]
    for bad in ("a b", "x" * 129, "é".encode()):
        response = await harness.get("/version", headers={"x-request-id": bad})
        assert len(response.headers["x-request-id"]) == 32
    twice = [("x-request-id", "a"), ("x-request-id", "b")]
    assert len((await harness.get("/version", headers=twice)).headers["x-request-id"]) == 32
    body = {"model": "tiny", "prompt": "a"}
    same = {"x-request-id": "same"}
    await asyncio.gather(*(harness.post("/v1/completions", body, headers=same) for _ in range(4)))
    assert len({submit.request_id for submit in harness.engine.submitted}) == 4


async def test_the_model_is_listed() -> None:
    body = (await Harness().get("/v1/models")).json()
    assert [model["id"] for model in body["data"]] == ["tiny"]
    assert body["data"][0]["max_model_len"] == 512
    assert (await Harness().get("/v1/models/tiny")).json()["id"] == "tiny"


async def test_g05_what_a_client_needs_to_write_prompts_itself() -> None:
    """As lm-eval's remote tokenizer asks for it."""
    body = (await Harness().get("/tokenizer_info")).json()
    assert (body["bos_token"], body["eos_token"]) == (BOS, EOS)
    assert body["chat_template"] == TEMPLATE
    assert body["model_max_length"] == 512
    assert "chat_template" not in (await Harness(template=None).get("/tokenizer_info")).json()
    assert (await Harness(api_key="k").get("/tokenizer_info")).status_code == 401


async def test_tokenize_and_detokenize() -> None:
    harness = Harness()
    body = (await harness.post("/tokenize", {"prompt": "ab", "return_token_strs": True})).json()
    assert body == {
        "count": 2, "max_model_len": 512, "tokens": [97, 98], "token_strs": ["a", "b"]
    }  # fmt: skip
    chat = await harness.post("/tokenize", {"messages": [{"role": "user", "content": "a"}]})
    assert chat.json()["tokens"][0] == 256
    assert (await harness.post("/detokenize", {"tokens": [97, 257]})).json() == {
        "prompt": "a<|end|>"
    }
    for path, bad in (
        ("/detokenize", {"tokens": [300]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
    ):
        assert (await harness.post(path, bad)).status_code == 400


async def test_metrics_carry_the_names_that_dashboards_read() -> None:
    """S04"""
    harness = Harness()
    await harness.complete("abc", max_tokens=3)
    assert harness.engine.stats is not None
    harness.engine.watcher.stepped(harness.engine.stats)
    text = (await harness.get("/metrics")).text
    label = 'model_name="tiny"'
    for line in (
        f"vllm:num_requests_running{{{label}}} 0.0",
        f"vllm:num_requests_waiting{{{label}}} 0.0",
        f"vllm:kv_cache_usage_perc{{{label}}} 0.0",
        f"vllm:prompt_tokens_total{{{label}}} 3.0",
        f"vllm:generation_tokens_total{{{label}}} 3.0",
        f"vllm:num_preemptions_total{{{label}}} 0.0",
        f"vllm:prefix_cache_queries_total{{{label}}} 100.0",
        f"vllm:prefix_cache_hits_total{{{label}}} 40.0",
        f'vllm:request_success_total{{finished_reason="length",{label}}} 1.0',
        f"vllm:time_to_first_token_seconds_count{{{label}}} 1.0",
        f"vllm:inter_token_latency_seconds_count{{{label}}} 2.0",
        f"vllm:time_per_output_token_seconds_count{{{label}}} 2.0",
        f"vllm:e2e_request_latency_seconds_count{{{label}}} 1.0",
        f"vllm:request_prompt_tokens_sum{{{label}}} 3.0",
        f"vllm:request_generation_tokens_sum{{{label}}} 3.0",
        f"vllm:iteration_tokens_total_count{{{label}}} 7.0",
        f"vllm:iteration_tokens_total_sum{{{label}}} 70.0",
        f'vllm:iteration_tokens_total_bucket{{le="10.0",{label}}} 7.0',
        f"vllm:request_queue_time_seconds_count{{{label}}} 1.0",
        f"vllm:request_prefill_time_seconds_count{{{label}}} 1.0",
        f"vllm:request_decode_time_seconds_count{{{label}}} 1.0",
        f"vllm:request_inference_time_seconds_count{{{label}}} 1.0",
        f"vllm:request_time_per_output_token_seconds_count{{{label}}} 1.0",
        f"manyroots:pages_held{{{label}}} 0.0",
    ):
        assert line in text


async def test_an_unexpected_failure_is_a_500_without_its_secrets() -> None:
    def broken(submit: Any) -> list[Output]:
        raise KeyError("a secret")

    response = await Harness(FakeEngine(broken)).complete()
    assert response.status_code == 500
    assert "secret" not in response.text
    assert error_of(response)["type"] == "server_error"
    streamed = await Harness(FakeEngine(broken)).complete(stream=True)
    assert streamed.status_code == 500
    assert "secret" not in streamed.text


@pytest.mark.parametrize("is_chat", [False, True])
async def test_streamed_token_ids_are_complete_where_tokens_have_no_text(is_chat: bool) -> None:
    """S01: half a character has no text yet, but its token has an id."""
    harness = Harness(FakeEngine(script(226, 130, 172, 65)))  # the euro sign's bytes, then A
    ask = harness.chat if is_chat else harness.complete
    answer = await ask(stream=True, return_token_ids=True)
    choices = [event["choices"][0] for event in events(answer)[:-1]]
    ids = [token for choice in choices for token in choice.get("token_ids") or []]
    assert ids[:4] == [226, 130, 172, 65]
