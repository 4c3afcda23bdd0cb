"""How much faster a prompt is in chunks than token by token, on a CPU (F06).

    python -m tests.measures.prompt_chunks [KIND ...]

A tiny model of each kind computes a prompt of 2,000 tokens in one step, and in 2,000. Prints JSON:
seconds of both by the clock and by processor time, and their ratio. Both must sample the same.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path

from manyroots import LLM, SamplingParams
from tests.unit.models.tiny import save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

NUM_TOKENS = 2000
KINDS = ["lfm2", "qwen3.5", "granite-h", "falcon-h1"]
ONE = SamplingParams(temperature=0, max_tokens=1)


def measure(kind: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny(folder, kind, vocab_size=300, max_position_embeddings=4096)
        tiny_backend().save(str(folder / "tokenizer.json"))
        whole, single = _seconds(folder, 2048), _seconds(folder, 1)
    assert whole[2] == single[2], "the two sample different tokens"
    return {
        "kind": kind,
        "num_tokens": NUM_TOKENS,
        "chunked_s": round(whole[0], 3),
        "by_token_s": round(single[0], 3),
        "ratio": round(single[0] / whole[0], 1),
        "processor_ratio": round(single[1] / whole[1], 1),
    }


def _seconds(folder: Path, num_step_tokens: int) -> tuple[float, float, list[int]]:
    rng = random.Random(1)
    prompt = [rng.randrange(3, 300) for _ in range(NUM_TOKENS)]
    with LLM(
        str(folder), dtype="float32", max_num_batched_tokens=num_step_tokens, max_num_seqs=1,
        max_model_len=2048, enable_prefix_caching=False, progress_bars=False,
    ) as llm:  # fmt: skip
        llm.generate([prompt[:50]], ONE)
        clock, processor = time.perf_counter(), time.process_time()
        [answer] = llm.generate([prompt], ONE)
        return (
            time.perf_counter() - clock,
            time.process_time() - processor,
            answer.outputs[0].token_ids,
        )


if __name__ == "__main__":
    for each in sys.argv[1:] or KINDS:
        print(json.dumps(measure(each)), flush=True)
