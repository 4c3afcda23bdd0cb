"""A model with recurrent layers over HTTP: reuse, and why there is no more of it (S07)."""

from __future__ import annotations

import random
import re
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import API_KEY, HEADERS, running
from tests.patience import PATIENCE_S
from tests.unit.models.tiny import save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend


@pytest.mark.slow
def test_s07_responses_and_metrics_say_why_a_prompt_was_not_reused(tmp_path: Path) -> None:
    """S07, H12: LFM2; a shared head is found from the third request on, with the same tokens."""
    save_tiny(tmp_path, "lfm2", vocab_size=300)
    tiny_backend().save(str(tmp_path / "tokenizer.json"))
    rng = random.Random(1)
    head = [rng.randrange(3, 300) for _ in range(37)]
    prompts = [head + [rng.randrange(3, 300) for _ in range(11)] for _ in range(3)]
    with running(
        str(tmp_path), "--served-model-name", "tiny", "--api-key", API_KEY, "--block-size", "4",
        "--max-num-seqs", "8",
    ) as server:  # fmt: skip
        server.wait_until_ready()
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S, headers=HEADERS) as client:
            details = []
            for prompt in [*prompts, prompts[2]]:
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 5, "ignore_eos": True}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                told = answer.json()["usage"]["prompt_tokens_details"]
                details.append((told["cached_tokens"], told["uncached_because"]))
            text = client.get("/metrics").text
    assert details == [(0, "cold"), (0, "checkpoint"), (36, "cold"), (44, "nothing")]
    pattern = r'^manyroots:prefix_cache_misses_total{.*reason="(\w+)"} (\S+)$'
    missed = {reason: float(count) for reason, count in re.findall(pattern, text, re.M)}
    assert missed == {"cold": 44 + 8, "checkpoint": 44}
