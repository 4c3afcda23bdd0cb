"""The blocks of the README and the docs that are marked `<!-- run -->`, as they stand.

Shell blocks talk to one server with the example adapters, started with the README's own flags. Only
the port is another. Python blocks run in a process of their own.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Server, running
from tests.helpers.patience import PATIENCE_S
from tests.helpers.snippets import PAGES, ROOT, Snippet, snippets

RUN = [snippet for page in PAGES for snippet in snippets(page) if snippet.mark == "<!-- run -->"]
ADDRESS = "http://127.0.0.1:8000"


def readme_flags() -> list[str]:
    """What the README's `make serve ARGS=...` passes to the server."""
    [flags] = re.findall(r'^make serve ARGS="(.*)"$', (ROOT / "README.md").read_text(), re.M)
    return shlex.split(flags)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(
        *readme_flags(), "--num-gpu-blocks-override", "400", "--max-model-len", "1024", cwd=ROOT
    ) as server:
        server.wait_until_ready()
        yield server


@pytest.mark.parametrize("snippet", RUN, ids=lambda snippet: f"{snippet.page}:{snippet.line}")
def test_a_block_of_the_docs_runs(snippet: Snippet, request: pytest.FixtureRequest) -> None:
    text = snippet.text
    if ADDRESS in text:
        server: Server = request.getfixturevalue("server")
        text = text.replace(ADDRESS, server.url)
    command = {"sh": ["bash", "-euc"], "python": [sys.executable, "-c"]}[snippet.language]
    done = subprocess.run(
        [*command, text], cwd=ROOT, capture_output=True, text=True, timeout=4 * PATIENCE_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip(), "it prints nothing"
    assert '"error"' not in done.stdout, done.stdout
