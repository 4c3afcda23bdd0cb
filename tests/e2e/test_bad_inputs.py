"""Bad requests against the real server, beside good ones (R03, N21, R05).

Each gets a 4xx that names the field, in under a second. Meanwhile greedy streams run: every one
of them must be byte for byte what it was alone. At the end no page is held by anyone.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import pytest

from tests.e2e.conftest import CONTEXT, HEADERS, Server
from tests.helpers.patience import PATIENCE_S

T = TypeVar("T")

LIMIT_S = 1.0
NUM_TRIES = 3
"""A refusal takes milliseconds. Beside other test processes one may have to wait for a core; a
slow refusal is slow every time."""
QUIET_S = 0.2
"""What a completion of one token takes at most where nothing else runs."""
GOOD_PROMPTS = ("The largest ocean on Earth is", "def fibonacci(n):", "Dear Sir or Madam,")
KEY_LINE = f"Authorization: {HEADERS['authorization']}\r\n"


@dataclass
class GoodLoad:
    """Greedy streams in the background, each compared with what it gave alone."""

    server: Server
    model: str
    wrong: list[str] = field(default_factory=list)
    num_finished: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def stream(self, prompt: str) -> str:
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": 16, "temperature": 0,
            "stream": True, "ignore_eos": True,
        }  # fmt: skip
        with httpx.stream(
            "POST",
            f"{self.server.url}/v1/completions",
            json=body,
            headers=HEADERS,
            timeout=PATIENCE_S,
        ) as response:
            data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        return "".join(json.loads(item)["choices"][0]["text"] for item in data[:-1])

    def run(self, prompt: str, expected: str) -> None:
        while not self.stop.is_set():
            text = self.stream(prompt)
            if text != expected:
                self.wrong.append(f"{prompt!r} gave {text!r} instead of {expected!r}")
            self.num_finished += 1


@pytest.fixture(scope="module", autouse=True)
def good_load(server: Server, model: str) -> Iterator[GoodLoad]:
    """Alone first, then beside every test of this module; checked when they are done."""
    server.wait_until_idle()
    load = GoodLoad(server, model)
    alone = {prompt: load.stream(prompt) for prompt in GOOD_PROMPTS}
    threads = [threading.Thread(target=load.run, args=item) for item in alone.items()]
    for thread in threads:
        thread.start()
    yield load
    load.stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not load.wrong
    assert load.num_finished >= len(GOOD_PROMPTS)
    server.wait_until_idle()


def quickly(server: Server, ask: Callable[[], T], limit_s: float = LIMIT_S) -> T:
    """What `ask` gives; it must give it within the limit, which is of a quiet machine: on one that
    takes longer for a completion of one token, as many times longer. The engine refuses some
    requests, between its steps."""
    took = []
    for _ in range(NUM_TRIES):
        start = time.monotonic()
        answer = ask()
        took.append(time.monotonic() - start)
        if took[-1] < limit_s:
            return answer
        model = server.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "hi", "max_tokens": 1}
        start = time.monotonic()
        least = httpx.post(
            server.url + "/v1/completions", json=body, headers=HEADERS, timeout=PATIENCE_S
        )
        least_s = time.monotonic() - start
        assert least.status_code == 200
        if took[-1] < limit_s * least_s / QUIET_S:
            return answer
    pytest.fail(f"answered after {took} s; the limit is {limit_s} s")


def refused(server: Server, path: str, body: Any, *, status: int = 400) -> dict[str, Any]:
    """Send it; the answer must be this 4xx, complete and quick. Gives the error."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = HEADERS | {"content-type": "application/json"}
    response = quickly(
        server,
        lambda: httpx.post(server.url + path, content=content, headers=headers, timeout=PATIENCE_S),
    )
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def raw(server: Server, request: bytes, *, end: bool = False) -> int:
    """Send bytes as they are; the status of the answer, 0 if the server just hung up."""

    def ask() -> bytes:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
            connection.sendall(request)
            if end:
                connection.shutdown(socket.SHUT_WR)
            return connection.recv(65536)

    answer = quickly(server, ask)
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def post_head(path: str, *lines: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{KEY_LINE}Content-Type: application/json\r\n"
    return (head + "".join(f"{line}\r\n" for line in lines) + "\r\n").encode()


COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [49152]}, "prompt"),
    ({"prompt": [2**63]}, "prompt"),
    ({"prompt": [5] * CONTEXT}, "prompt"),
    ({"prompt": "long " * CONTEXT}, "prompt"),
    ({"prompt": "x" * 4_000_000}, "prompt"),
    ({"prompt": ["a"] * 10_000}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2**63}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 2}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": 100, "prompt": ["a"] * 100}, "n"),
    ({"stop": ["x"] * 1000}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"logit_bias": {"hello": 1}}, "logit_bias"),
    ({"logit_bias": {"1.5": 1}}, "logit_bias"),
    ({"logit_bias": {"true": 1}}, "logit_bias"),
    ({"repetition_penalty": 1e-45}, "repetition_penalty"),
    ({"logit_bias": {"49152": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1e30}}, "logit_bias"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids"),
    ({"logprobs": 10**6}, "logprobs"),
    ({"prompt_logprobs": 10**6}, "prompt_logprobs"),
    ({"guided_regex": "[unclosed"}, "guided_regex"),
    ({"guided_regex": "(a+)+$" * 100}, "guided_regex"),
    ({"guided_json": {"$ref": "#"}}, "guided_json"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"cache_salt": "x" * 2**20}, "cache_salt"),
    ({"cache_salt": "../../etc/passwd"}, "cache_salt"),
    ({"cache_salt": "a\x00b"}, "cache_salt"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
]


@pytest.mark.parametrize(("fields", "param"), COMPLETIONS, ids=lambda value: str(value)[:40])
def test_a_bad_completion(server: Server, model: str, fields: dict[str, Any], param: str) -> None:
    """R03, N21"""
    error = refused(server, "/v1/completions", {"model": model, "prompt": "hi"} | fields)
    assert error["param"] == param
    assert param in error["message"]


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/secret.png"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "long " * CONTEXT}]}, "messages"),
    ({"chat_template": "{{ ''.__class__ }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"unknown": 1}}, "chat_template_kwargs"),
    ({"response_format": SCHEMA}, "response_format"),
    ({"top_logprobs": 10**6, "logprobs": True}, "top_logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), CHATS, ids=lambda value: str(value)[:40])
def test_a_bad_chat(server: Server, model: str, fields: dict[str, Any], param: str) -> None:
    """R03"""
    good = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    error = refused(server, "/v1/chat/completions", good | fields)
    assert error["param"] == param
    assert param in error["message"]


BODIES: list[tuple[bytes, str]] = [
    (b"", "not JSON"),
    (b"{nope", "not JSON"),
    (b'{"model": "m", "prompt": "cut of', "not JSON"),
    (b"[" * 10_000 + b"]" * 10_000, "nested too deeply"),
    (b'{"model": "m", "prompt": "a", "prompt": "b"}', "'prompt' is given twice"),
    (b'{"model": "m", "prompt": "\xc3\x28"}', "not UTF-8"),
    (b'{"model": "m", "prompt": "\\ud800"}', "prompt holds the lone surrogate"),
    (b'{"model": "m", "prompt": "a", "temperature": NaN}', "temperature is NaN"),
    (b'{"model": "m", "prompt": "a", "temperature": Infinity}', "temperature is Infinity"),
    (b'{"model": "m", "prompt": "a", "logit_bias": {"5": -Infinity}}', "logit_bias.5"),
    (b'{"prompt": "a"}', "model is missing"),
]


@pytest.mark.parametrize(("body", "says"), BODIES, ids=lambda value: str(value)[:40])
def test_a_bad_body(server: Server, body: bytes, says: str) -> None:
    """R03"""
    assert says in refused(server, "/v1/completions", body)["message"]


def test_an_unknown_model_is_a_404(server: Server) -> None:
    """R03, N19: never the base model's output."""
    body = {"model": "no-such-adapter", "prompt": "hi"}
    assert refused(server, "/v1/completions", body, status=404)["param"] == "model"


def test_a_wrong_content_type_is_a_415(server: Server, model: str) -> None:
    """R03"""
    response = httpx.post(
        f"{server.url}/v1/completions",
        data={"model": model, "prompt": "hi"},
        headers=HEADERS,
        timeout=PATIENCE_S,
    )
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["", "Content-Type: application/x-www-form-urlencoded\r\n"])
def test_what_curl_sends_is_accepted(server: Server, model: str, kind: str) -> None:
    """R03: no content type, or a form's, around good JSON; and null fields of other servers."""
    body = {"model": model, "prompt": "hi", "max_tokens": 1, "surprise": 1, "temperature": 1e-45}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{KEY_LINE}{kind}"
    head += f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head.encode() + content)
        assert connection.recv(64).startswith(b"HTTP/1.1 200 ")


def test_a_body_of_100_mb_is_a_413(server: Server) -> None:
    """R03: told by its length, before it is read."""
    head = post_head("/v1/completions", "Content-Length: 104857600")
    assert raw(server, head + b"{" * 65536) == 413


def test_a_client_that_sends_all_100_mb_still_reads_the_413(server: Server) -> None:
    """R03"""
    headers = HEADERS | {"content-type": "application/json"}
    url = f"{server.url}/v1/completions"
    response = httpx.post(url, content=b"x" * 100_000_000, headers=headers, timeout=PATIENCE_S)
    assert response.status_code == 413
    assert "8388608 bytes" in response.json()["error"]["message"]


def test_an_endless_chunked_body_is_a_413(server: Server) -> None:
    """R03: without a length, as soon as it is too much."""
    head = post_head("/v1/completions", "Transfer-Encoding: chunked")

    def ask() -> bytes:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
            connection.sendall(head)
            for _ in range(9):
                connection.sendall(b"100000\r\n" + b" " * 2**20 + b"\r\n")
            return connection.recv(4096)

    # It has to take in 8 MiB first.
    assert quickly(server, ask, 2 * LIMIT_S).startswith(b"HTTP/1.1 413 ")


MALFORMED: list[tuple[bytes, tuple[int, ...]]] = [
    (b"NOT HTTP AT ALL\r\n\r\n", (400,)),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", (400,)),
    (post_head("/v1/completions", "Content-Length: -5"), (400,)),
    (post_head("/v1/completions", "Content-Length: 5", "Content-Length: 6") + b"{}", (400,)),
    (post_head("/v1/completions", "Content-Length: abc"), (400,)),
    (post_head("/v1/completions", "Transfer-Encoding: chunked") + b"zz\r\n", (400,)),
    (post_head("/v1/completions", *(f"X-{i}: 1" for i in range(101)), "Content-Length: 0"), (431,)),
    (post_head("/v1/completions", "X-Big: " + "a" * 40_000, "Content-Length: 0"), (431,)),
    (post_head("/v1/completions", "X-Huge: " + "a" * 200_000, "Content-Length: 0"), (400, 431)),
    (b"GET /nope HTTP/1.1\r\nHost: x\r\n" + KEY_LINE.encode() + b"\r\n", (404,)),
    (b"DELETE /v1/completions HTTP/1.1\r\nHost: x\r\n" + KEY_LINE.encode() + b"\r\n", (405,)),
    (b"GET /v1/models HTTP/1.1\r\nHost: x/health\r\n\r\n", (401,)),
    (b"GET /v1/models HTTP/1.1\r\nHost: /health?\r\n\r\n", (401,)),
    (b"GET /v1/models HTTP/1.1\r\nHost: x/health\r\n" + KEY_LINE.encode() + b"\r\n", (400,)),
    (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nHost: y\r\n" + KEY_LINE.encode() + b"\r\n", (400,)),
    (b"GET http://x/health/../v1/models HTTP/1.1\r\nHost: x\r\n\r\n", (401,)),
    (b"GET /health/../v1/models HTTP/1.1\r\nHost: x\r\n\r\n", (401,)),
]


@pytest.mark.parametrize(("request_", "statuses"), MALFORMED, ids=lambda value: str(value)[:40])
def test_malformed_http(server: Server, request_: bytes, statuses: tuple[int, ...]) -> None:
    """R03, R05: authorisation looks at the routed path only."""
    assert raw(server, request_) in statuses


def test_a_body_that_ends_early_is_not_waited_for(server: Server) -> None:
    """R03: the connection is gone, so at most an error can be said."""
    head = post_head("/v1/completions", "Content-Length: 500")
    assert raw(server, head + b'{"model": "m"', end=True) in (0, 400)


def test_the_same_request_id_twice_at_once_is_two_requests(server: Server, model: str) -> None:
    """R03: the caller's id names its answers, and the server's own ids keep requests apart."""
    body = {"model": model, "prompt": GOOD_PROMPTS[0], "max_tokens": 4, "temperature": 0}
    headers = HEADERS | {"x-request-id": "same"}
    answers: list[httpx.Response] = []

    def ask() -> None:
        url = f"{server.url}/v1/completions"
        answers.append(httpx.post(url, json=body, headers=headers, timeout=PATIENCE_S))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.headers["x-request-id"] for answer in answers] == ["same"] * 3
    assert [answer.json()["id"] for answer in answers] == ["cmpl-same"] * 3
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {4}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
