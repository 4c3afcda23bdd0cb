"""Storage that takes longer than computing, measured by the engine's own clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from manyroots.store.backends.files import Files
from tests.unit.test_llm_tiers import GREEDY, ask, prompts
from tests.unit.test_llm_windows import serve


def test_t05_throttled_storage_is_tried_once_and_then_left_alone(tmp_path: Path) -> None:
    """T05: each value takes 30 ms, many times what computing its page does."""
    settings = {"kv_storage": f"file://{tmp_path}/kv", "num_gpu_blocks_override": 70}
    with serve(tmp_path / "model", "full", **settings) as llm:
        cold = [ask(llm, prompt)[0] for prompt in prompts()]
    real, asked = Files.get, []

    def get(self: Files, keys: Sequence[bytes], num_bytes: int) -> Any:
        asked.append(len(keys))
        time.sleep(0.03 * len(keys))
        return real(self, keys, num_bytes)

    with (
        mock.patch.object(Files, "get", get),
        serve(tmp_path / "again", "full", **settings) as llm,
    ):
        fresh = prompts()[0][::-1]
        ask(llm, fresh)  # what computing takes is measured by then, and what a miss does
        warm, uses = [], []
        for prompt in prompts():
            [answer] = llm.generate([prompt], GREEDY)
            warm.append(answer.outputs[0].token_ids)
            uses.append(answer.cache_use)
        assert warm == cold
        assert len(asked) <= 2, "storage that is slower than computing was asked again and again"
        assert {use.limit for use in uses[1:] if use is not None} == {"storage"}
