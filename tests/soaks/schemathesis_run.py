"""Schemathesis over the server's own OpenAPI document: no 5xx, no hang, no other answers (G11).

    python -m tests.soaks.schemathesis_run [--examples 50] [--seed 1] [--folder
        /tmp/manyroots-clients]

A real server of a tiny model on loopback; Schemathesis in a venv of its own, which is made once in
the folder. Admin routes are tested last, on a server of their own, since they pause and sleep.
Prints what Schemathesis says, and exits with 1 if it found something.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients.__main__ import SCRIPTS, venv_of
from tests.e2e.conftest import API_KEY
from tests.helpers.tiny_server import ADMIN_KEY, tiny_server

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_headers_conformance", "response_schema_conformance", "unsupported_method",
    "negative_data_rejection",
)  # fmt: skip
"""Not among them: whether all that the schema allows is taken. What a document can't say (lengths,
fields that exclude each other, models that are not here) is a 400."""
HOOKS = "schemathesis_hooks"
TIMEOUT_S = 60
OF_ADMINS = (
    "^/(pause|resume$|is_|reset_prefix_cache|flush_cache|continue_generation|update_weights"
    "|v1/load_lora|v1/unload_lora)"
)
OF_SLEEP = "^/(sleep|wake_up|release_memory|resume_memory|is_)"
"""Tested last: an engine that is asleep answers the other routes with 503."""


def run(command: str, url: str, key: str, flags: list[str]) -> int:
    with tempfile.TemporaryDirectory() as home:  # it leaves files where it runs
        return subprocess.run(
            [
                command, "run", f"{url}/openapi.json", "--header", f"Authorization: Bearer {key}",
                "--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing",
                "--request-timeout", str(TIMEOUT_S), "--generation-database", "none",
                "--continue-on-failure", "--no-color", *flags,
            ],
            cwd=home,
            env={**os.environ, "PYTHONPATH": str(SCRIPTS), "SCHEMATHESIS_HOOKS": HOOKS},
        ).returncode  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=50, help="for each route, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/manyroots-clients"))
    given = parser.parse_args()
    command = str(venv_of(given.folder / "schemathesis", ("schemathesis",)) / "schemathesis")
    common = ["--seed", str(given.seed), "--max-examples", str(given.examples)]
    with tiny_server() as server:
        failed = run(command, server.url, API_KEY, common)
    with (
        tempfile.TemporaryDirectory() as adapters,
        tiny_server(
            "--admin-key", ADMIN_KEY, "--enable-lora", "--enable-lora-endpoints",
            "--lora-dirs", adapters,
        ) as server,
    ):  # fmt: skip
        for paths in (OF_ADMINS, OF_SLEEP):
            only = ["--include-path-regex", paths]
            failed |= run(command, server.url, ADMIN_KEY, common + only)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
