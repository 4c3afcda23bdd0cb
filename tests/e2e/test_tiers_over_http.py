"""Tiers over HTTP: a server that was killed and started again still has its pages."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest

from tests.e2e.adapter_server import PAGE_SIZE, cached, serving, tokens
from tests.helpers.patience import PATIENCE_S
from tests.helpers.quick_tiers import worth_loading_there
from tests.helpers.tiny_adapters import TinyAdapters


@pytest.mark.slow
def test_t06_a_server_started_again_finds_its_storage_warm(tmp_path: Path) -> None:
    """T06, T07, S07: base model and adapter; the first server is killed, not asked to end."""
    tiny = TinyAdapters(tmp_path)
    rng = random.Random(1)
    prompt = [rng.randrange(3, 300) for _ in range(60)]
    more: dict[str, int | str] = {
        "kv-storage": f"file://{tmp_path}/kv", "kv-storage-timeout-s": int(PATIENCE_S),
        "num-host-pages": 40,
    }  # fmt: skip
    module = f"all={tiny.path('all')}"
    with serving(tiny, module, **more) as server:
        cold = [server.complete(name, prompt) for name in ("tiny", "all")]
        assert [cached(answer) for answer in cold] == [0, 0]
        wait_for_files(tmp_path / "kv", 2 * (60 // PAGE_SIZE))
        server.server.process.kill()
    with serving(tiny, module, env=worth_loading_there(tiny.model.parent), **more) as server:
        warm = [server.complete(name, prompt) for name in ("all", "tiny")]
        assert [cached(answer) for answer in warm] == [56, 56]
        assert [tokens(answer) for answer in warm] == [tokens(answer) for answer in cold[::-1]]
        details = warm[1].json()["usage"]["prompt_tokens_details"]
        assert details["cached_by_tier"] == {"device": 0, "host": 0, "storage": 56}
        assert details["uncached_because"] == "nothing"
        again = server.complete("tiny", prompt).json()["usage"]["prompt_tokens_details"]
        assert again["cached_by_tier"] == {"device": 56, "host": 0, "storage": 0}
        server.assert_balance()
        text = server.server.get("/metrics").text
        found = re.findall(r'hits_by_tier_total{.*tier="(\w+)"} (\S+)', text)
        assert dict(found) == {"device": "56.0", "host": "0.0", "storage": "112.0"}
        assert re.search(r"^manyroots:storage_readable{.*} 1.0$", text, re.M)


def wait_for_files(folder: Path, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(list(folder.glob("v1/??/*"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
