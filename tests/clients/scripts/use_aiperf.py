"""aiperf: a small profile over each of the endpoints that it knows and this server has."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from reporting import KEY, MODEL, TOKENIZER, URL, main

COMMAND = Path(sys.executable).parent / "aiperf"
NUM_REQUESTS = 6
NUM_OUTPUT_TOKENS = 8
LIMITED = ("--prompt-output-tokens-mean", str(NUM_OUTPUT_TOKENS))


def profile(kind: str, *flags: str) -> None:
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [
                COMMAND, "profile", "--model", MODEL, "--url", URL, "--api-key", KEY,
                "--endpoint-type", kind, "--tokenizer", TOKENIZER,
                "--concurrency", "2", "--request-count", str(NUM_REQUESTS),
                "--prompt-input-tokens-mean", "32", "--num-dataset-entries", "4",
                "--random-seed", "1", "--ui", "none", "--no-gpu-telemetry",
                "--output-artifact-dir", home, *flags,
            ],
            capture_output=True,
            text=True,
            cwd=home,
        )  # fmt: skip
        reports = list(Path(home).rglob("profile_export_aiperf.json"))
        assert reports, (done.stdout + done.stderr)[-600:]
        report = json.loads(reports[0].read_text())
    assert report["request_count"]["avg"] == NUM_REQUESTS, report
    assert not report.get("error_summary"), report["error_summary"]
    if "--prompt-output-tokens-mean" in flags:
        assert 1 <= report["output_sequence_length"]["avg"] <= NUM_OUTPUT_TOKENS + 1


def named(name: str, kind: str, *flags: str) -> Callable[[], None]:
    def run() -> None:
        profile(kind, *flags)

    run.__name__ = name
    return run


CHECKS = [
    named("chats", "chat", "--streaming", *LIMITED),
    named(
        "chats_counted_by_the_server", "chat", "--streaming", "--use-server-token-count",
        "--per-chunk-usage", *LIMITED,
    ),
    named("several_turns", "chat", "--streaming", "--conversation-turn-mean", "2", *LIMITED),
    named("completions", "completions", "--streaming", *LIMITED),
    named("responses", "responses", "--streaming", *LIMITED),
    named("messages", "messages", "--streaming", *LIMITED),
    named("embeddings", "embeddings"),
]  # fmt: skip

if __name__ == "__main__":
    main(CHECKS)
