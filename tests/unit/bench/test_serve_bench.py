"""`bench serve` against servers whose times and faults are known."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from manyroots.bench.http_stream import HttpStreamError, HttpStreams
from manyroots.bench.serve import Arrivals, Promise, run_serve
from manyroots.bench.serve_workload import ServeWorkload
from manyroots.bench.traffic_cases import CASES
from manyroots.cli.main import main
from manyroots.errors import RequestError
from tests.helpers.patience import PATIENCE_S

Answer = Callable[[dict[str, Any]], AsyncIterator[bytes]]
WORKLOAD = ServeWorkload(num_requests=6, prompt_words=(3, 5), output_tokens=(4, 4), models=("m",))
PROMISE = Promise(first_token_s=PATIENCE_S, between_tokens_s=PATIENCE_S)
GAP_S = 0.05
"""Between two tokens of a server. A late reader may find all but two of them at once."""


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def tokens(body: dict[str, Any], gap_s: float = 0.0) -> AsyncIterator[bytes]:
    count = body["max_tokens"]
    for number in range(count):
        await asyncio.sleep(gap_s)
        yield event({"choices": [{"text": f" t{number}"}]})
    yield event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": count}})
    yield b"data: [DONE]\n\n"


@contextmanager
def server(answer: Answer, *, cut: int = 0, status: int = 200) -> Iterator[tuple[str, list[dict]]]:
    """Answers every POST with `answer`'s bytes, `cut` at a time; collects the bodies."""
    bodies: list[dict[str, Any]] = []
    started, end, at = Event(), asyncio.Event(), []

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                raw = await reader.readexactly(length)
                if head.startswith("GET"):
                    text = json.dumps({"data": [{"id": "first"}]}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(text))
                    writer.write(text)
                    continue
                bodies.append(json.loads(raw))
                if status != 200:
                    writer.write(b"HTTP/1.1 %d No\r\ncontent-length: 4\r\n\r\nfull" % status)
                    continue
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                async for data in answer(bodies[-1]):
                    framed = chunk(data)
                    for begin in range(0, len(framed), cut or len(framed)):
                        writer.write(framed[begin : begin + (cut or len(framed))])
                        await asyncio.sleep(0)
                writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> None:
        listening = await asyncio.start_server(connection, "127.0.0.1", 0)
        at.append((asyncio.get_running_loop(), listening.sockets[0].getsockname()[1]))
        started.set()
        await end.wait()
        listening.close()

    thread = Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    started.wait(PATIENCE_S)
    loop, port = at[0]
    try:
        yield f"http://127.0.0.1:{port}", bodies
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(PATIENCE_S)


def test_b01_times_and_tokens_are_those_of_the_server() -> None:
    """B01: and a warm-up is not counted."""
    with server(lambda body: tokens(body, GAP_S)) as (url, bodies):
        report = run_serve(url, None, WORKLOAD, [Arrivals(streams=6)], PROMISE, 2)
    [case] = report["cases"]
    assert case["requests"] == 12
    assert len(bodies) == 12 + 4
    assert case["faults"] == {}
    first = case["time_to_first_token_s"]["p50"]
    longest = case["seconds"]["most"]
    assert 0.9 * GAP_S <= first["least"] < longest
    assert len(first["samples"]) == 2
    assert GAP_S / 10 <= case["time_between_tokens_s"]["p99"]["median"] < longest
    rate = case["output_tokens_per_s"]
    assert rate["samples"][0] == pytest.approx(24 / case["seconds"]["samples"][0], rel=0.02)
    assert case["goodput_requests_per_s"] == case["requests_per_s"]


def test_b01_bytes_may_come_in_any_pieces() -> None:
    with server(tokens, cut=3) as (url, _):
        report = run_serve(url, None, WORKLOAD, [Arrivals(streams=2)], PROMISE, 1)
    assert report["cases"][0]["requests"] == 6
    assert report["cases"][0]["faults"] == {}


@pytest.mark.parametrize("strict", [Promise(GAP_S / 2, PATIENCE_S), Promise(PATIENCE_S, 0.001)])
def test_b01_a_promise_that_is_not_kept_is_not_goodput(strict: Promise) -> None:
    with server(lambda body: tokens(body, GAP_S)) as (url, _):
        report = run_serve(url, None, WORKLOAD, [Arrivals(streams=6)], strict, 1)
    assert report["cases"][0]["goodput_requests_per_s"]["median"] == 0.0


def test_b01_a_server_that_refuses_or_breaks_off_is_no_fast_server() -> None:
    with server(tokens, status=429) as (url, _), pytest.raises(Exception, match="429: full"):
        run_serve(url, None, WORKLOAD, [Arrivals(streams=2)], PROMISE, 1)

    async def broken(body: dict[str, Any]) -> AsyncIterator[bytes]:
        if body["max_tokens"] == 4 and "stone" in body["prompt"]:
            yield event({"error": {"message": "gone"}})
        else:
            async for data in tokens(body):
                yield data

    many = ServeWorkload(
        num_requests=40, prompt_words=(20, 40), output_tokens=(4, 4), models=("m",)
    )
    with server(broken) as (url, _):
        [case] = run_serve(url, None, many, [Arrivals(streams=8)], PROMISE, 1)["cases"]
    num_faults = sum(case["faults"].values())
    assert 0 < num_faults < 40
    assert case["requests"] == 40


def test_b01_talks_carry_what_was_said_and_names_follow_zipf() -> None:
    conversation = ServeWorkload(
        num_requests=4, prompt_words=(2, 2), output_tokens=(3, 3), turns=2, num_heads=1,
        head_words=5, models=("m",), is_chat=True, ignore_eos=False,
    )  # fmt: skip

    async def chat(body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        yield event({"choices": [{"delta": {"content": "yes"}}]})

    with server(chat) as (url, bodies):
        run_serve(url, None, conversation, [Arrivals(streams=1)], PROMISE, 1)
    first, second = bodies[4:6]
    assert "ignore_eos" not in first
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    said = second["messages"]
    assert said[:2] == first["messages"]
    assert said[2] == {"role": "assistant", "content": "yes"}
    assert said[3]["role"] == "user"

    names = tuple(f"a{i}" for i in range(8))
    many = ServeWorkload(
        num_requests=400, prompt_words=(1, 1), output_tokens=(1, 1), models=names, zipf=1.0
    )
    asked = Counter(conversation.model for conversation in many.conversations())
    assert asked["a0"] > 2 * asked["a3"] > 0


def test_b01_arrivals_keep_their_rate_and_bursts_come_together() -> None:
    due = Arrivals(rate=10.0).due_s(2000, seed=0)
    assert due[-1] == pytest.approx(200.0, rel=0.1)
    bursts = Arrivals(rate=10.0, burst=4).due_s(2000, seed=0)
    assert bursts[-1] == pytest.approx(200.0, rel=0.2)
    assert all(len(set(bursts[i : i + 4])) == 1 for i in range(0, 2000, 4))


def test_b01_waiting_counts_from_when_a_request_was_due() -> None:
    """B01: a server that takes one request at a time makes the others wait, and that is seen."""
    lock = asyncio.Lock()

    async def one_at_a_time(body: dict[str, Any]) -> AsyncIterator[bytes]:
        async with lock:
            async for data in tokens(body, 0.02):
                yield data

    with server(one_at_a_time) as (url, _):
        [case] = run_serve(url, None, WORKLOAD, [Arrivals(rate=1000.0)], PROMISE, 1)["cases"]
    first = case["time_to_first_token_s"]
    assert first["p50"]["least"] > 0.07
    # Half of the time between the two: a machine that is late at first is so for all of them.
    assert first["p99"]["median"] - first["p50"]["least"] > 0.1


def test_b01_the_command_writes_json_and_a_picture(tmp_path: Path) -> None:
    report, picture = tmp_path / "serve.json", tmp_path / "serve.html"
    with server(tokens) as (url, bodies):
        flags = (
            "--requests", "4", "--output-len", "2-3", "--rates", "50,100", "--streams", "2",
            "--repeats", "1", "--sampled", "--json", str(report), "--plot", str(picture),
        )  # fmt: skip
        assert main(["bench", "serve", "--url", url, *flags]) == 0
    found = json.loads(report.read_text())
    labels = [case["arrivals"] for case in found["cases"]]
    assert labels == ["50 conversations/s", "100 conversations/s", "2 streams"]
    assert found["workload"]["models"] == ["first"]
    assert "<svg" in picture.read_text()
    assert bodies[-1]["temperature"] == 0.7


def test_b01_a_case_of_bench_traffic_is_sent_token_by_token_and_then_at_shares_of_its_rate(
    tmp_path: Path,
) -> None:
    """B01: every run with a cache of its own, and fewer requests where they come more slowly."""
    report = tmp_path / "serve.json"
    with server(tokens) as (url, bodies):
        flags = (
            "--case", "mixed-greedy", "--vocab-size", "500", "--requests", "10", "--lengths",
            "0.05", "--streams", "10", "--loads", "0.4,1.0", "--repeats", "1",
            "--json", str(report),
        )  # fmt: skip
        assert main(["bench", "serve", "--url", url, *flags]) == 0
    full, part, whole = json.loads(report.read_text())["cases"]
    assert [case["requests"] for case in (full, part, whole)] == [10, 4, 10]
    most = full["requests_per_s"]["median"]
    assert part["rate"] == pytest.approx(0.4 * most, rel=0.01)
    assert whole["arrivals"].endswith("100% load")
    case = CASES["mixed-greedy"].shrunk(10, 0.05)
    submits = case.submits(500, "", itertools.count(), with_adapters=False)
    sent = [body for body in bodies if body["cache_salt"] == "bench-0"]
    assert sorted(body["prompt"] for body in sent) == sorted(list(s.prompt) for s in submits)
    assert {body["max_tokens"] for body in sent} == {s.sampling.max_tokens for s in submits}
    assert len({body["cache_salt"] for body in bodies}) == 4  # the warm-up has one, too


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--case", "none"), "--case is 'none'"),
        (("--case", "mixed-greedy"), "--vocab-size"),
        (("--case", "mixed-greedy", "--vocab-size", "9", "--turns", "2"), "leave out --endpoint"),
        (("--loads", "0"), "--loads must hold"),
        (("--url", "localhost:8000"), "--url is 'localhost:8000'"),
        (("--url", "http://127.0.0.1:1"), "start the server first"),
        (("--rates", "0"), "above 0"),
        (("--output-len", "9-3"), "--output-len is 9-3"),
        (("--plot", "serve.png"), "--plot is 'serve.png'"),
        (("--json", "/no/such/folder/x.json"), "no folder /no/such/folder"),
        (("--json", "/tmp"), "--json is '/tmp', a folder"),
        (("--shared-heads", "2"), "--head-words"),
    ],
)
def test_wrong_flags_are_named(
    flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # Not the default port, where another server may listen: of two urls the last one counts.
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1", *flags]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--rates", "fast"), "--rates: 'fast' is no list of numbers, like 0.5,2"),
        (("--streams", "1,"), "--streams: '1,' is no list of whole numbers, like 16,64"),
        (("--output-len", "5-"), "--output-len: '5-' is no range of whole numbers, like 64-1024"),
    ],
)
def test_numbers_that_are_none_are_shown_what_was_wanted(
    flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", *flags])
    assert says in capsys.readouterr().err


SSE = b"content-type: text/event-stream; charset=utf-8\r\n"


async def as_sse_starlette(writer: asyncio.StreamWriter) -> None:
    """What llama-cpp-python and others send: lines end with CRLF, and comments keep it alive."""
    writer.write(b"HTTP/1.1 200 OK\r\n" + SSE + b"Transfer-Encoding: Chunked\r\n\r\n")
    writer.write(chunk(b": ping - 2026-11-16\r\n\r\n"))
    opening = {"choices": [{"delta": {"role": "assistant", "content": None}}]}
    for part in (opening, *({"choices": [{"delta": {"content": "x"}}]} for _ in range(4))):
        writer.write(chunk(b"data: " + json.dumps(part).encode() + b"\r\n\r\n"))
        await asyncio.sleep(GAP_S)
    writer.write(chunk(b"data: [DONE]\r\n\r\n") + b"0\r\n\r\n")


async def until_closed(writer: asyncio.StreamWriter) -> None:
    """HTTP/1.0, lines without a space after the colon, and none after the last line."""
    writer.write(b"HTTP/1.0 200 OK\r\n" + SSE + b"\r\n")
    lines = [b'data:{"choices": [{"delta": {"reasoning": "x"}}]}' for _ in range(4)]
    for number, line in enumerate(lines):
        writer.write(line + (b"\n\n" if number < 3 else b""))
        await writer.drain()
        await asyncio.sleep(GAP_S)
    writer.close()


async def whole(writer: asyncio.StreamWriter) -> None:
    """A server that streams nothing, in chunks of its own."""
    body = {"choices": [{"message": {"role": "assistant", "content": "xxxx"}}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 4}}  # fmt: skip
    text = json.dumps(body).encode()
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
    writer.write(b"transfer-encoding: chunked\r\n\r\n" + chunk(text[:9]) + chunk(text[9:]))
    writer.write(b"0\r\n\r\n")


async def under_others(models: bytes, answer: Callable[..., Any]) -> dict[str, Any]:
    """A chat's report from a server that is not ours; `models`: what it says to /v1/models."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
                if head.startswith("get"):
                    writer.write(models)
                else:
                    await answer(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with await asyncio.start_server(connection, "127.0.0.1") as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1/"
        workload = replace(WORKLOAD, models=(), is_chat=True)
        arrivals = [Arrivals(streams=2)]
        return await asyncio.to_thread(run_serve, url, None, workload, arrivals, PROMISE, 1)


LISTED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    + chunk(b'{"data": [{"id": "theirs"}]}')
    + b"0\r\n\r\n"
)


@pytest.mark.parametrize("answer", [as_sse_starlette, until_closed, whole])
def test_b01_servers_that_are_not_ours_are_understood(answer: Callable[..., Any]) -> None:
    """B01: any OpenAI server, whatever its lines, lengths and connections are like."""
    report = asyncio.run(under_others(LISTED, answer))
    [case] = report["cases"]
    assert report["workload"]["models"] == ("theirs",)
    assert case["faults"] == {}
    assert case["requests"] == 6
    rate, seconds = (case[name]["samples"][0] for name in ("output_tokens_per_s", "seconds"))
    assert rate == pytest.approx(24 / seconds, rel=0.02)
    gaps = case["time_between_tokens_s"]["p99"]["median"]
    assert gaps == 0 if answer is whole else gaps >= GAP_S / 10, (
        "events have the time of their bytes"
    )


def test_b01_a_server_that_cant_be_asked_is_told_with_the_remedy() -> None:
    none = b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno"
    with pytest.raises(RequestError, match=r"404: no.*name one with --ask-for"):
        asyncio.run(under_others(none, whole))

    async def strict(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 422 No\r\ncontent-length: 17\r\n\r\nextra: ignore_eos")

    with pytest.raises(RequestError, match=r"422: extra: ignore_eos .--stop-at-end leaves out"):
        asyncio.run(under_others(LISTED, strict))


def test_a_server_that_hangs_up_in_the_middle_is_named() -> None:
    async def ask(port: int) -> None:
        streams = HttpStreams(f"http://127.0.0.1:{port}", None)
        with pytest.raises(HttpStreamError, match="broke off"):
            await streams.post("/v1/completions", {})

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nda")
        writer.close()

    async def both() -> None:
        listening = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        await ask(listening.sockets[0].getsockname()[1])
        listening.close()

    asyncio.run(both())


def test_b01_a_kept_connection_that_the_server_has_closed_is_no_fault() -> None:
    """B01: servers close what was idle, perhaps as the next request is sent; that one is sent
    again. One on a connection of its own is not: then the server breaks off."""
    text = b'{"choices": [{"text": "x"}]}'
    served: list[int] = []

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        served.append(1)
        if len(served) < 3:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(text) + text)
            await writer.drain()
            await reader.readuntil(b"{}")
        writer.close()

    async def conversation() -> None:
        async with await asyncio.start_server(connection, "127.0.0.1") as listening:
            port = listening.sockets[0].getsockname()[1]
            streams = HttpStreams(f"http://127.0.0.1:{port}", None)
            for _ in range(2):
                answer = await streams.post("/v1/completions", {})
                assert answer.events[0][1] == json.loads(text)
            with pytest.raises(HttpStreamError, match="broke off"):
                await streams.post("/v1/completions", {})
            streams.close()

    asyncio.run(conversation())
    assert len(served) == 3


def test_b01_the_load_generator_needs_no_torch() -> None:
    """B01: it starts at once, and where there is none."""
    code = "import sys, manyroots.bench.serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
