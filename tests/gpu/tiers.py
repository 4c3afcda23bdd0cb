"""Tiers on a GPU: device, host, files, a new engine, device: the same bits and the same tokens.

Takes an empty folder, a kind of tiny model and a dtype; raises AssertionError on a difference, else
says what was compared. Page-locked memory, streams of their own and copies in batches are what runs
here and nowhere else. `device` is "cpu" where the comparison itself is tried.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyroots import LLM, SamplingParams
from manyroots.cache.keys import PrefixKey
from manyroots.cache.matching import path_units
from manyroots.cache.planes import ABSENT
from manyroots.ids import Namespace
from tests.unit.models.tiny import save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

KINDS = ("llama", "gpt-oss", "lfm2")
"""All attention over everything; windows among it; recurrent states among it."""
NUM_PROMPTS, PROMPT_LEN, PAGE_SIZE, NUM_PAGES = 8, 170, 16, 36
"""The device holds about three of the prompts."""
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
COLD = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, prompt_logprobs=0)
"""Computed, whatever is cached."""
_SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "initializer_range": 0.1, "eos_token_id": 257,
}  # fmt: skip
Bits = dict[tuple[int, int], bytes]
"""By (family, page)."""


def check(folder: Path, kind: str, dtype: str, device: str = "cuda") -> str:
    sizes = _SIZES | ({"intermediate_size": 128} if kind == "gpt-oss" else {})
    save_tiny(folder / "model", kind, **sizes)
    tiny_backend().save(str(folder / "model" / "tokenizer.json"))
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 300) for _ in range(PROMPT_LEN)] for _ in range(NUM_PROMPTS)]

    def start(overlap: str) -> LLM:
        return LLM(
            str(folder / "model"), device=device, dtype=dtype, block_size=PAGE_SIZE,
            max_model_len=256, num_gpu_blocks_override=NUM_PAGES, num_host_pages=400,
            kv_storage=f"file://{folder}/{overlap}", kv_load_overlap=overlap,
        )  # fmt: skip

    told = []
    for overlap in ("off", "on"):
        with start(overlap) as llm:
            if device == "cuda":
                _check_locked(llm)
            cold, warm, bits = [], [], []
            for prompt in prompts:
                cold.append(_ask(llm, prompt, COLD)[0])
                bits.append(_on_device(llm, prompt))
                warm.append(_ask(llm, prompt, GREEDY))
            same = sum(tokens == found for tokens, (found, _) in zip(cold, warm, strict=True))
            # Other kernels compute few tokens than many, which rounds differently in half
            # precision. So does a step that reads pages while they come, which is no graph.
            assert same == NUM_PROMPTS or dtype != "float32", f"{same} of {NUM_PROMPTS} as cold"
            is_exact = overlap == "off" or dtype == "float32"
            from_host = _again(llm, prompts, warm, bits, is_exact=is_exact)
            assert llm.stats().total_host_hit_tokens > 0, "nothing came from the host"
            assert llm.stats().num_held_pages == 0
        with start(overlap) as llm:
            from_files = _again(llm, prompts, warm, bits, is_exact=is_exact)
            assert llm.stats().total_storage_hit_tokens > 0, "nothing came from the files"
            assert llm.stats().num_held_pages == 0
        tokens = "tokens as from the device, " if is_exact else ""
        told.append(
            f"overlap {overlap}: {from_host} units by way of the host and {from_files} by way of "
            f"files, bit by bit; {tokens}of {same} of {NUM_PROMPTS} prompts as computed"
        )
    return "; ".join(told)


def _ask(llm: LLM, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], int]:
    [answer] = llm.generate([prompt], sampling)
    return answer.outputs[0].token_ids, answer.num_cached_tokens


def _again(
    llm: LLM,
    prompts: list[list[int]],
    warm: list[tuple[list[int], int]],
    bits: list[Bits],
    *,
    is_exact: bool,
) -> int:
    """Ask for everything again: as many tokens cached as from the device, and the same answers. If
    not `is_exact`, the first tokens are the same, until two equally likely tokens part them. Gives
    how many units were compared."""
    compared = 0
    for prompt, expected, before in zip(prompts, warm, bits, strict=True):
        found = _ask(llm, prompt, GREEDY)
        now = _on_device(llm, prompt)
        both = now.keys() & before.keys()
        different = [unit for unit in both if now[unit] != before[unit]]
        assert not different, f"units (family, page) {sorted(different)} of {len(both)} differ"
        count = None if is_exact else 1
        same = found[1] == expected[1] and found[0][:count] == expected[0][:count]
        assert same, f"tokens and how many cached: {found}, from the device {expected}"
        compared += len(both)
    assert compared, "nothing to compare"
    return compared


def _on_device(llm: LLM, prompt: list[int]) -> Bits:
    """The bits of a prompt's units that the index has on the device."""
    cache: Any = llm._loop._scheduler._cache  # type: ignore[attr-defined]
    arenas: Any = llm._loop._runner._arenas  # type: ignore[attr-defined]
    walk = cache.lookup(PrefixKey(Namespace(None, None)), np.array(prompt, np.int32)).walk
    return {
        (family, page): _bits(arenas[family].data[unit])
        for family, plane in enumerate(cache.layout.device)
        for page, unit in enumerate(path_units(walk.nodes, walk.depth, plane).tolist())
        if unit != ABSENT
    }


def _bits(unit: torch.Tensor) -> bytes:
    return unit.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()


def _check_locked(llm: LLM) -> None:
    tiers: Any = llm._loop._runner._mover._tiers  # type: ignore[attr-defined]
    assert all(arena.data.is_pinned() for arena in tiers.host), "host memory is not page-locked"
