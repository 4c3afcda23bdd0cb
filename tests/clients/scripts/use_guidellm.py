"""guidellm: a small benchmark over each of the endpoints that it knows and this server has."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from reporting import KEY, MODEL, TOKENIZER, URL, main

COMMAND = Path(sys.executable).parent / "guidellm"
NUM_REQUESTS = 6
NUM_OUTPUT_TOKENS = 8


def benchmark(route: str, *, stream: bool = True) -> None:
    backend = {
        "kind": "openai_http", "target": URL, "model": MODEL, "api_key": KEY,
        "request_format": route, "stream": stream,
    }  # fmt: skip
    data = {"kind": "synthetic_text", "prompt_tokens": 32, "output_tokens": NUM_OUTPUT_TOKENS}
    with tempfile.TemporaryDirectory() as home:
        report = Path(home) / "report.json"
        done = subprocess.run(
            [
                COMMAND, "run", "--disable-console",
                "--backend", json.dumps(backend),
                "--profile", "kind=concurrent,streams=2",
                "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
                "--tokenizer", json.dumps({"kind": "huggingface_auto", "model": TOKENIZER}),
                "--data", json.dumps(data),
                "--output", json.dumps({"kind": "json", "path": str(report)}),
            ],
            capture_output=True,
            text=True,
            cwd=home,
        )  # fmt: skip
        assert report.exists(), (done.stdout + done.stderr)[-600:]
        [found] = json.loads(report.read_text())["benchmarks"]
    _check(found, route)


def _check(found: dict[str, object], route: str) -> None:
    requests = found["requests"]
    assert len(requests["errored"]) == 0, requests["errored"][:1]
    assert len(requests["successful"]) == NUM_REQUESTS
    if route != "/v1/embeddings":
        for request in requests["successful"]:
            assert request["output_metrics"]["text_tokens"] == NUM_OUTPUT_TOKENS, request


def named(name: str, route: str, *, stream: bool = True) -> Callable[[], None]:
    def run() -> None:
        benchmark(route, stream=stream)

    run.__name__ = name
    return run


CHECKS = [
    named("chats", "/v1/chat/completions"),
    named("chats_whole", "/v1/chat/completions", stream=False),
    named("completions", "/v1/completions"),
    named("responses", "/v1/responses"),
    named("embeddings", "/v1/embeddings", stream=False),
]

if __name__ == "__main__":
    main(CHECKS)
