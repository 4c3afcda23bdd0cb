"""Compressed groups and an index through the real engine: how much of a conversation is reused."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyroots import LLM, SamplingParams
from tests.unit.models.tiny import save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

NUM_CONVERSATIONS, NUM_TURNS, NUM_ANSWERED = 2, 5, 3
LEAST_SHARE = 0.95


def words(conversation: int, turn: int) -> list[int]:
    """A user's turn: of another length each, and none a whole number of pages."""
    count = 9 + 4 * turn + conversation
    return [3 + (97 * conversation + 31 * turn + 7 * at) % 290 for at in range(count)]


def hit_ratio(folder: Path, kind: str) -> float:
    """The share of prompt tokens that conversations found in the cache, all side by side."""
    save_tiny(folder, kind, vocab_size=300)
    tiny_backend().save(str(folder / "tokenizer.json"))
    answer = SamplingParams(temperature=0, max_tokens=NUM_ANSWERED, ignore_eos=True)
    histories: list[list[int]] = [[] for _ in range(NUM_CONVERSATIONS)]
    num_cached = num_tokens = 0
    with LLM(
        str(folder), dtype="float32", block_size=4, max_model_len=192, max_num_seqs=4,
        max_num_batched_tokens=64, num_gpu_blocks_override=300, progress_bars=False,
    ) as llm:  # fmt: skip
        for turn in range(NUM_TURNS):
            for number, history in enumerate(histories):
                history += words(number, turn)
            for history, output in zip(histories, llm.generate(histories, answer), strict=True):
                num_cached += output.num_cached_tokens or 0
                num_tokens += len(history)
                history += output.outputs[0].token_ids
    return num_cached / num_tokens


@pytest.fixture(scope="module")
def of_full_attention(tmp_path_factory: pytest.TempPathFactory) -> float:
    return hit_ratio(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("kind", ["deepseek-v4", "deepseek-v32", "glm-moe-dsa"])
def test_f10_conversations_are_reused_as_with_full_attention(
    kind: str, of_full_attention: float, tmp_path: Path
) -> None:
    """F10: at least 0.95 of the hit ratio that full attention has in the same conversations."""
    assert of_full_attention > 0.5, "conversations of several turns"
    assert hit_ratio(tmp_path, kind) >= LEAST_SHARE * of_full_attention
