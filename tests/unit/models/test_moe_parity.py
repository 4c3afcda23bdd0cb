"""Mixtures of experts give transformers' logits and greedy tokens, whatever the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manyroots import LLM, SamplingParams
from manyroots.kernels.tolerances import assert_close
from tests.unit.models.paged import PagedModel
from tests.unit.models.test_logits_parity import expected, prompts
from tests.unit.models.tiny import load_tiny, save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

NUM_NEW_TOKENS = 12
VARIANTS: dict[str, dict[str, Any]] = {
    "normalized": {},
    "plain": {"norm_topk_prob": False},
    "some-dense": {"decoder_sparse_step": 2, "norm_topk_prob": False},
    "all-experts": {"num_experts_per_tok": 8},
    "many-experts": {"num_experts": 60, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_alone_batched_and_in_chunks(
    variant: str, seed: int, tmp_path: Path
) -> None:
    """F01."""
    theirs = save_tiny(tmp_path, "qwen3-moe", seed=seed, **VARIANTS[variant])
    ours = load_tiny(tmp_path)
    tokens = prompts()
    wanted = {name: expected(theirs, ids) for name, ids in tokens.items()}
    alone = PagedModel(ours).step({"a": tokens["a"]})
    assert_close("logits", alone["a"], wanted["a"], torch.float32)
    paged = PagedModel(ours)
    got: dict[str, list[Tensor]] = {name: [] for name in tokens}
    for begin in range(0, 41, 9):
        now = {name: cut for name, ids in tokens.items() if (cut := ids[begin : begin + 9])}
        for name, logits in paged.step(now).items():
            got[name].append(logits)
    for name, parts in got.items():
        assert_close("logits", torch.cat(parts), wanted[name], torch.float32)


@pytest.mark.parametrize("variant", ["normalized", "some-dense"])
def test_the_engine_gives_transformers_greedy_tokens(variant: str, tmp_path: Path) -> None:
    theirs = save_tiny(tmp_path, "qwen3-moe", vocab_size=300, **VARIANTS[variant])
    tiny_backend().save(str(tmp_path / "tokenizer.json"))
    generator = torch.Generator().manual_seed(7)
    common = torch.randint(0, 256, (20,), generator=generator).tolist()
    given = [[*common[:length], length] for length in (3, 9, 20, 20, 17)]
    theirs.generation_config.eos_token_id = None
    wanted = []
    for prompt in given:
        output = theirs.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NUM_NEW_TOKENS,
            pad_token_id=0,
        )
        wanted.append(output[0, len(prompt) :].tolist())
    greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    settings = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 64}
    with LLM(str(tmp_path), long_prefill_token_threshold=7, **settings) as llm:
        for _ in range(2):  # cold, then from the cache
            results = llm.generate(given, greedy)
            assert [result.outputs[0].token_ids for result in results] == wanted
        assert llm.stats().total_hit_tokens > 0
        assert llm.stats().num_held_pages == 0
