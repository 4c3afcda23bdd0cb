"""What looking costs the engine, in processor time: `python -m tests.measures.page_costs
[SECONDS]`.

A real server of a tiny model under load. Ten pages: the processor time that the engine's process
says each look took, over all that it used meanwhile. None: what noting a step takes, measured by
itself over many steps, over what a step takes the process. A tiny model's steps are the shortest
there are, so that both shares are upper bounds for others.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from manyroots.ids import StepId
from manyroots.observe.steps import StepRing
from manyroots.step import Plan, StepResult
from tests.e2e.adapter_server import ADMIN, AdapterServer
from tests.helpers.page_server import page_server, tiny_model, traffic
from tests.helpers.patience import cpu_seconds

NUM_ROWS = 64
NUM_NOTED = 20_000
NUM_PAGES = 10


def ring_seconds() -> float:
    """Of noting one step of 64 rows that decode."""
    ring = StepRing(256)
    rows = np.arange(NUM_ROWS, dtype=np.int32)
    ones, samples = np.ones(NUM_ROWS, np.int32), np.ones(NUM_ROWS, np.bool_)
    noted = [
        (Plan(StepId(i), (), (), rows, ones, samples), StepResult(StepId(i), rows))
        for i in range(1, NUM_NOTED + 1)
    ]
    begin = time.thread_time()
    for plan, result in noted:
        ring.launched(plan)
        ring.done(result)
    return (time.thread_time() - begin) / NUM_NOTED


class OpenPage(threading.Thread):
    """Reads a page's stream, and adds up what its looks took."""

    def __init__(self, served: AdapterServer, *, wants_tree: bool) -> None:
        super().__init__(daemon=True)
        self._served = served
        self._path = "/page/stream?tree=1" if wants_tree else "/page/stream"
        self.looks_ms: list[float] = []
        self.steps: list[int] = []
        self.is_over = False

    def run(self) -> None:
        with self._served.client.stream("GET", self._path, headers=ADMIN) as answer:
            for line in answer.iter_lines():
                if self.is_over:
                    return
                if line.startswith("data: {") and '"look_ms"' in line:
                    now = json.loads(line[6:])["now"]
                    self.looks_ms.append(now["look_ms"])
                    self.steps.append(now["steps"])


def measure(served: AdapterServer, seconds: float, num_pages: int) -> tuple[float, float, float]:
    """Processor time of a step, of all looks, and of the process meanwhile."""
    pages = [OpenPage(served, wants_tree=number == 0) for number in range(num_pages)]
    engine = served.server.children()
    for page in pages:
        page.start()
    time.sleep(2)
    first, steps = cpu_seconds(engine), _steps(served)
    seen = [len(page.looks_ms) for page in pages]
    time.sleep(seconds)
    used, done = cpu_seconds(engine) - first, _steps(served) - steps
    looks = sum(pages[0].looks_ms[seen[0] :]) / 1000 if pages else 0.0
    for page in pages:
        page.is_over = True
    for page in pages:
        page.join()
    return used / max(done, 1), looks, used


def _steps(served: AdapterServer) -> float:
    text = served.client.get("/metrics", headers={"authorization": "Bearer e2e-key"}).text
    found = re.search(r"^vllm:iteration_tokens_total_count\{[^}]*\} (\S+)$", text, re.M)
    assert found is not None
    return float(found[1])


def main(seconds: float) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="manyroots-costs-") as home,
        page_server(tiny_model(Path(home)), with_attack=False) as served,
        traffic(served, 16),
    ):
        time.sleep(3)
        alone_s, _, _ = measure(served, seconds, 0)
        ten_s, looks_s, used_s = measure(served, seconds, NUM_PAGES)
    noting_s = ring_seconds()
    print(f"a step takes the engine's process {1000 * alone_s:.3f} ms with no page open, "
          f"{1000 * ten_s:.3f} ms with {NUM_PAGES}")  # fmt: skip
    print(f"no page: noting a step takes {1e6 * noting_s:.2f} us, {noting_s / alone_s:.3%} of it "
          "(at most 0.2%)")  # fmt: skip
    print(f"{NUM_PAGES} pages, one of them with the tree: looking took {1000 * looks_s:.1f} ms of "
          f"{1000 * used_s:.0f} ms, {looks_s / used_s:.2%} (at most 2%)")  # fmt: skip


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 20.0)
