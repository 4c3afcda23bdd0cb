"""The blocks of the README and the docs that are marked `<!-- run -->`, as they stand.

Shell blocks talk to one server with the example adapters, started with the README's own flags. Only
the port is another, and some large counts are smaller (`SMALLER`). Python blocks run in a process
of their own, where transformers reads GGUF files with `quick_gguf`. The blocks of a tutorial run
one after the other in a folder of their own, where files of earlier blocks are.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Server, running
from tests.helpers.patience import PATIENCE_S
from tests.helpers.snippets import PAGES, ROOT, TUTORIALS, Snippet, snippets

NIGHTLY = ("docs/tutorials/many-adapters.md", "docs/tutorials/train-an-adapter.md")
RUN = [
    pytest.param(
        snippet,
        id=f"{snippet.page}:{snippet.line}",
        marks=[pytest.mark.nightly] if snippet.page in NIGHTLY else [],
    )
    for page in PAGES
    for snippet in snippets(page)
    if snippet.mark == "<!-- run -->"
]
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
}
"""The commands of this installation come first. On a busy machine several threads wait for each
other most of the time."""
ADDRESS = "http://127.0.0.1:8000"
SMALLER = {
    "README.md": {'"max_tokens": 40': '"max_tokens": 8', "max_tokens=40": "max_tokens=8"},
    "docs/tutorials/first-steps.md": {'"max_tokens": 40': '"max_tokens": 8'},
    "docs/tutorials/many-adapters.md": {"200": "20"},
    "docs/tutorials/size-a-deployment.md": {"--num-requests 100": "--num-requests 30"},
}
"""By page: counts, and what stands for them here. No block checks how long an answer is."""


def readme_flags() -> list[str]:
    """What the README's `make serve ARGS=...` passes to the server."""
    pages = (ROOT / "README.md", TUTORIALS / "first-steps.md")
    found = [re.findall(r'^make serve ARGS="(.*)"$', page.read_text(), re.M) for page in pages]
    assert found[0] == found[1], "the README and the first tutorial start the same server"
    [flags] = found[0]
    return shlex.split(flags)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(
        *readme_flags(), "--num-gpu-blocks-override", "400", "--max-model-len", "1024", cwd=ROOT
    ) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where the blocks of a page run."""
    made: dict[str, Path] = {}

    def folder(page: str) -> Path:
        if not (ROOT / page).is_relative_to(TUTORIALS):
            return ROOT
        if page not in made:
            made[page] = tmp_path_factory.mktemp(Path(page).stem)
        return made[page]

    return folder


@pytest.mark.parametrize("snippet", RUN)
def test_d01_a_block_of_the_docs_runs(
    snippet: Snippet, folders: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    """D01."""
    text = snippet.text
    for count, smaller in SMALLER.get(snippet.page, {}).items():
        text = text.replace(count, smaller)
    if ADDRESS in text:
        server: Server = request.getfixturevalue("server")
        text = text.replace(ADDRESS, server.url)
    command = {"sh": ["bash", "-euc"], "python": [sys.executable, "-c"]}[snippet.language]
    environment = ENVIRONMENT
    if "gguf_file=" in text:
        command = [sys.executable, "-m", "tests.helpers.quick_gguf"]
        environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, text], cwd=folders(snippet.page), capture_output=True, text=True,
        timeout=4 * PATIENCE_S, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip(), "it prints nothing"
    assert '"error"' not in done.stdout, done.stdout
