"""Models with windows, served: what an endless cache would reuse is reused (F04)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from manyroots import LLM, SamplingParams
from tests.soaks.differential import COMPRESSED_MIXES, MIXES, PAGE
from tests.unit.models.tiny import save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

SERVED = {**MIXES, **COMPRESSED_MIXES}
NUM_CHATS, NUM_TURNS, MAX_LEN = 4, 4, 240
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


def serve(folder: Path, mix: str, **settings: Any) -> LLM:
    kind, changes = SERVED[mix]
    save_tiny(folder, kind, vocab_size=300, **changes)
    tiny_backend().save(str(folder / "tokenizer.json"))
    return LLM(
        str(folder), dtype="float32", block_size=PAGE, max_model_len=MAX_LEN,
        max_num_batched_tokens=48, max_num_seqs=4, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("mix", SERVED)
def test_f04_turns_of_chats_find_nearly_all_that_an_endless_cache_would_have(
    mix: str, tmp_path: Path
) -> None:
    """F04, F10: at least 0.98 of it, where memory suffices, although windows gave pages back. With
    full attention it is all of it."""
    rng = random.Random(5)
    system = [rng.randrange(3, 300) for _ in range(23)]
    chats = [list(system) for _ in range(NUM_CHATS)]
    found = best = 0
    with serve(tmp_path, mix, kv_cache_memory_bytes=64 << 20) as llm:
        known: list[list[int]] = []
        for _ in range(NUM_TURNS):
            for index, chat in enumerate(chats):
                prompt = chat + [rng.randrange(3, 300) for _ in range(rng.randint(5, 19))]
                [answer] = llm.generate([prompt], GREEDY)
                found += answer.num_cached_tokens
                best += max((reusable(prompt, old) for old in known), default=0)
                chats[index] = prompt + answer.outputs[0].token_ids
                known.append(chats[index][:-1])  # the last token was never computed
    assert found >= 0.98 * best, f"{found} of {best} tokens"


def reusable(prompt: list[int], old: list[int]) -> int:
    """Tokens in whole pages that both begin with; the prompt's last token is always computed."""
    same = 0
    for one, other in zip(prompt[:-1], old, strict=False):
        if one != other:
            break
        same += 1
    return same // PAGE * PAGE
