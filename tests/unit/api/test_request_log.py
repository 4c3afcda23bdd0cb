"""What operators are told (G09): a line per request, a line every ten seconds, traces."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from manyroots.adapter_names import LoraModule
from manyroots.api import server
from manyroots.cli.main import main
from manyroots.config import LoraSettings
from manyroots.messages import FinishReason, Output, Stats, Submit
from manyroots.observe.throughput import Throughput, Totals
from manyroots.observe.traces import Traces
from tests.unit.api.fake_engine import FakeEngine
from tests.unit.api.harness import Harness
from tests.unit.api.test_server_life import BODY, Life

pytestmark = pytest.mark.anyio

SECRET = "hello secret"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "manyroots.requests"]


@pytest.mark.parametrize("stream", [False, True])
async def test_g09_a_line_per_request(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """G09: id, adapter, tokens, times and reason; nothing of the text."""
    caplog.set_level(logging.INFO)
    lora = LoraSettings(enable_lora=True, lora_modules=(LoraModule("styles", "/x"),))
    harness = Harness(lora=lora, enable_log_requests=True)
    answer = await harness.complete(SECRET, max_tokens=3, stream=stream, model="styles")
    assert answer.status_code == 200
    await harness.complete([[1, 2], [3, 4, 5]], n=2, max_tokens=4)
    first, second = lines(caplog)
    assert re.fullmatch(
        r"cmpl-\w+ adapter=styles prompt=\d+ cached=2 output=3 ttft=[\d.]+s total=[\d.]+s "
        r"finish=length",
        first,
    )
    assert first.split()[0] in answer.text
    assert "adapter=- prompt=5 cached=4 output=16 " in second, "a prompt counts once, choices all"
    assert "secret" not in caplog.text


async def test_g09_how_a_request_ended_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """G09: given up by its caller, and failed."""
    caplog.set_level(logging.INFO)
    harness = Harness(enable_log_requests=True)
    harness.engine.gate.clear()
    body = {"model": "tiny", "prompt": "ab"}
    async with harness.connected("/v1/completions", body):
        while not harness.engine.running:
            await asyncio.sleep(0.001)

    def broken(submit: Submit) -> list[Output]:
        return [Output(submit.request_id, [], FinishReason.ERROR, 0, error="torn")]

    failing = Harness(FakeEngine(broken), enable_log_requests=True)
    assert (await failing.complete()).status_code == 500
    aborted, failed = lines(caplog)
    assert "output=0 ttft=- " in aborted
    assert aborted.endswith("finish=abort")
    assert failed.endswith("finish=error")


async def test_g09_no_line_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    """G09"""
    caplog.set_level(logging.INFO)
    assert (await Harness().complete()).status_code == 200
    assert lines(caplog) == []


def stats(**counts: float) -> Stats:
    zeros: dict[str, Any] = dict.fromkeys(Stats.__dataclass_fields__, 0)
    return Stats(
        **(
            zeros
            | {"adapters": None, "storage": None, "missed_tokens": {}, "first_runs": {}}
            | counts
        )
    )


def test_g09_throughput_is_of_the_time_between_two_looks() -> None:
    """G09: and nothing is said while nothing happens."""
    first = stats(num_pages=100, total_lookup_tokens=1000, total_hit_tokens=900)
    throughput = Throughput(Totals(0.0, 500, 100, first))
    assert throughput.line(Totals(10.0, 500, 100, first)) is None
    busy = stats(
        num_pages=100, page_usage=0.25, num_running=3, num_waiting=2, total_lookup_tokens=1200,
        total_hit_tokens=950,
    )  # fmt: skip
    assert throughput.line(Totals(20.0, 700, 350, busy)) == (
        "running 3, waiting 2, prompt 20.0 tok/s, generation 25.0 tok/s, cache in use 25.0%, "
        "hit rate 25.0%"
    )
    # Started again: it counts from nothing.
    new = stats(num_pages=100, num_running=1, total_lookup_tokens=100, total_hit_tokens=50)
    line = throughput.line(Totals(30.0, 700, 351, new))
    assert line is not None
    assert line.endswith("hit rate 50.0%")
    idle = stats(num_pages=100, total_lookup_tokens=100, total_hit_tokens=50)
    assert throughput.line(Totals(40.0, 700, 351, idle)) is None
    assert throughput.line(Totals(50.0, 700, 351, None)) is None


@pytest.mark.parametrize("is_on", [True, False])
async def test_g09_a_busy_server_says_what_it_does(
    tmp_path: Path, is_on: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G09: off by flag."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(server, "INTERVAL_S", 0.02)
    life = Life(tmp_path, log_stats=is_on)
    life.engine.gate.clear()

    async def script(client: httpx.AsyncClient) -> None:
        await life.ready(client)
        answer = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await life.until_running(1)
        if is_on:
            while "running 1, waiting 0, " not in caplog.text:
                await asyncio.sleep(0.01)
        else:
            await asyncio.sleep(0.2)
        life.engine.gate.set()
        assert (await answer).status_code == 200
        life.server._on_signal()

    assert await life.run(script) == 0
    assert ("tok/s" in caplog.text) == is_on


class Collector:
    """Takes spans by OTLP over HTTP, as a collector does."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

                body = self.rfile.read(int(self.headers["content-length"]))
                request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        outer.spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


async def test_g09_a_span_per_request(collector: Collector) -> None:
    """G09: under the caller's own span, with the attributes that vLLM's have."""
    traces = Traces(collector.endpoint)
    harness = Harness()
    harness.state.request_sinks.append(traces)
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    body = {"model": "tiny", "prompt": SECRET, "max_tokens": 3, "temperature": 0.5, "top_p": 0.9}
    headers = {"traceparent": f"00-{trace}-{parent}-01"}
    answer = await harness.post("/v1/completions", body, headers=headers)
    assert (await harness.chat(stream=True, max_tokens=2)).status_code == 200
    await asyncio.to_thread(traces.close)
    first, second = collector.spans
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (trace, parent)
    assert second.trace_id.hex() != trace
    found = {item.key: item.value for item in first.attributes}
    assert found["gen_ai.request.id"].string_value == answer.json()["id"]
    assert found["gen_ai.response.model"].string_value == "tiny"
    assert found["gen_ai.usage.completion_tokens"].int_value == 3
    assert found["gen_ai.usage.prompt_tokens"].int_value == answer.json()["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.cached_tokens"].int_value == 2
    assert found["gen_ai.request.temperature"].double_value == 0.5
    assert found["gen_ai.request.max_tokens"].int_value == 3
    assert found["gen_ai.latency.time_to_first_token"].double_value > 0
    assert first.end_time_unix_nano > first.start_time_unix_nano
    assert b"secret" not in first.SerializeToString()


async def test_g09_a_collector_that_is_gone_harms_no_request() -> None:
    """G09"""
    harness = Harness()

    def broken(facts: Any) -> None:
        raise ConnectionError("gone")

    harness.state.request_sinks.append(broken)
    assert (await harness.complete()).status_code == 200


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [("http://127.0.0.1:9", "pip install opentelemetry-sdk"), ("localhost:4317", "http://")],
)
def test_g09_traces_that_cannot_be_are_refused_at_once(
    endpoint: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """G09: without the SDK, and with an endpoint that is none."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", str(tmp_path), "--otlp-traces-endpoint", endpoint]) == 2
    assert message in capsys.readouterr().err
