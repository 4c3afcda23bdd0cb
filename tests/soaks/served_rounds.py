"""128 clients in 12 rounds over HTTP, with half of the memory that an endless cache would fill.

    python -m tests.soaks.served_rounds [--clients 128] [--rounds 12] [--share 0.5] [--kind qwen3.5]

A real server around a tiny hybrid, real bytes. One system prompt, odd lengths, each client's next
question after the server's own answers. The memory is that share of what `simulate rounds` keeps of
the same conversations when nothing is evicted, pages and checkpoints together; the server chooses
how both share it. Prints JSON: what was found of the prompts beside what the best offline policies
find of the same requests in the same order, with the same memory shared in the best way for them;
and the tokens that were not found by reason, as responses and `/metrics` say them (S07). Ends with
1 if less than 0.95 of the best is found, or if a token that was not found has no reason.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from manyroots.cache.keys import PrefixKey
from manyroots.ids import Namespace
from manyroots.simulate.offline import best_offline_hit_rate, endless_hit_rate
from manyroots.simulate.paths import Paths, lay_out_served
from manyroots.simulate.state_rates import NUM_BUSY, StateReplay, best_offline_states
from tests.e2e.conftest import API_KEY, HEADERS, running
from tests.unit.models.tiny import load_tiny, save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

PAGE, VOCAB, MAX_ROWS = 4, 300, 16
SYSTEM, QUESTION, ANSWER = 175, (25, 75), (10, 37)
"""A quarter of `simulate rounds`', and so is the page: as many pages."""
INTERVAL = 512
GOOD = 0.95
BASE = PrefixKey(Namespace(adapter=None, salt=None))
SIZES: dict[str, Any] = {
    "num_key_value_heads": 1, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
"""Of delta nets: a state is many pages, as in the models that people serve."""


@dataclass
class Plan:
    """Each client's questions; answers are the server's own."""

    questions: list[list[list[int]]]
    lengths: list[list[int]]
    """Of the answers."""
    system: list[int]

    @classmethod
    def draw(cls, num_clients: int, num_rounds: int, seed: int) -> Plan:
        rng = random.Random(seed)

        def text(count: int) -> list[int]:
            return [rng.randrange(3, VOCAB) for _ in range(count)]

        clients, rounds = range(num_clients), range(num_rounds)
        return cls(
            [[text(rng.randint(*QUESTION)) for _ in rounds] for _ in clients],
            [[rng.randint(*ANSWER) for _ in rounds] for _ in clients],
            text(SYSTEM),
        )

    @property
    def max_len(self) -> int:
        return SYSTEM + len(self.questions[0]) * (QUESTION[1] + ANSWER[1]) + 1


@dataclass
class Served:
    """What was asked and found, in the order of the answers."""

    sequences: list[tuple[PrefixKey, Any, int]] = field(default_factory=list)
    found: int = 0
    asked: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Tokens that whole pages could have had, by what the response says of them."""


async def _talk(
    client: httpx.AsyncClient, plan: Plan, number: int, served: Served
) -> AsyncIterator[None]:
    """One client, round by round."""
    said = list(plan.system)
    for question, length in zip(plan.questions[number], plan.lengths[number], strict=True):
        said += question
        body = {
            "model": "tiny", "prompt": said, "max_tokens": length, "ignore_eos": True,
            "temperature": 0, "return_token_ids": True,
        }  # fmt: skip
        answer = await client.post("/v1/completions", json=body)
        answer.raise_for_status()
        told = answer.json()
        details = told["usage"]["prompt_tokens_details"]
        served.found += details["cached_tokens"]
        served.asked += len(said)
        lost = (len(said) - 1) // PAGE * PAGE - details["cached_tokens"]
        if lost:
            served.reasons[details["uncached_because"]] += lost
        tokens = told["choices"][0]["token_ids"]
        kept = np.array(said + tokens[:-1], np.int32)
        served.sequences.append((BASE, kept, len(said)))
        said = said + tokens
        yield


async def _to_its_end(talk: AsyncIterator[None]) -> None:
    async for _ in talk:
        pass


async def _all_talks(url: str, plan: Plan, is_in_turn: bool) -> tuple[Served, str]:
    served = Served()
    limits = httpx.Limits(max_connections=len(plan.questions))
    async with httpx.AsyncClient(
        base_url=url, headers=HEADERS, timeout=600, limits=limits
    ) as client:
        talks = [_talk(client, plan, number, served) for number in range(len(plan.questions))]
        if is_in_turn:
            for _ in plan.questions[0]:
                for talk in talks:
                    await anext(talk)
        await asyncio.gather(*map(_to_its_end, talks))
        metrics = (await client.get("/metrics")).text
    return served, metrics


def endless_units(plan: Plan) -> tuple[int, int]:
    """Pages and checkpoints that a cache without limits keeps of these talks, by the real cache:
    the answers' tokens do not matter for that."""
    replay = StateReplay(1 << 20, 1 << 20, PAGE, INTERVAL // PAGE)
    said = [list(plan.system) for _ in plan.questions]
    for turn in range(len(plan.questions[0])):
        for number, history in enumerate(said):
            history += plan.questions[number][turn]
            num_prompt = len(history)
            answer = [3 + (number + i) % (VOCAB - 3) for i in range(plan.lengths[number][turn])]
            replay.serve(BASE, np.array(history + answer[:-1], np.int32), num_prompt)
            history += answer
    planes = replay.cache.stats().planes
    return planes[0].num_cached, planes[1].num_cached


def best_offline(paths: Paths, page_bytes: int, state_bytes: int, num_bytes: int) -> float:
    """With that memory shared in the best of many ways: no more can be found than either pages or
    states allow."""
    shares = [step / 64 for step in range(1, 64)]
    best = 0.0
    for share in shares:
        num_states = int(num_bytes * share) // state_bytes
        num_pages = int(num_bytes * (1 - share)) // page_bytes
        longest = max(sum(paths.sizes[run] for run in visit.runs) for visit in paths.visits)
        if num_pages > longest and num_states > NUM_BUSY:
            pages = best_offline_hit_rate(paths, num_pages)
            best = max(best, min(pages, best_offline_states(paths, num_states)))
    return best


def run(kind: str, plan: Plan, share: float, *, is_in_turn: bool = False) -> dict[str, Any]:
    """`is_in_turn`: the clients wait for each other, so that what is found depends on nothing but
    what they ask."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        save_tiny(folder, kind, vocab_size=VOCAB, max_position_embeddings=plan.max_len, **SIZES)
        tiny_backend().save(str(folder / "tokenizer.json"))
        decoder = load_tiny(folder)
        sizes = {f.is_state: f.unit_bytes(PAGE, decoder.dtype) for f in decoder.families}
        num_pages, num_states = endless_units(plan)
        num_bytes = int(share * (num_pages * sizes[False] + num_states * sizes[True]))
        with running(
            str(folder), "--served-model-name", "tiny", "--api-key", API_KEY, "--dtype", "float32",
            "--block-size", str(PAGE), "--max-num-seqs", str(MAX_ROWS),
            "--max-model-len", str(plan.max_len), "--checkpoint-interval-tokens", str(INTERVAL),
            "--kv-cache-memory-bytes", str(num_bytes + MAX_ROWS * sizes[True]),
        ) as server:  # fmt: skip
            server.wait_until_ready()
            served, metrics = asyncio.run(_all_talks(server.url, plan, is_in_turn))
    paths = lay_out_served(served.sequences, PAGE)
    best = best_offline(paths, sizes[False], sizes[True], num_bytes)
    pattern = r'^manyroots:prefix_cache_misses_total{.*reason="(\w+)"} (\S+)$'
    counted = {reason: int(float(n)) for reason, n in re.findall(pattern, metrics, re.M)}
    rate = served.found / served.asked
    return {
        "kind": kind, "requests": len(served.sequences), "prompt_tokens": served.asked,
        "endless_pages": num_pages, "endless_states": num_states, "share": share,
        "pages_in_a_state": round(sizes[True] / sizes[False], 1),
        "hit_rate": round(rate, 4), "best_offline": round(best, 4),
        "endless": round(endless_hit_rate(paths), 4), "of_best": round(rate / best, 4),
        "lost_by_response": dict(served.reasons),
        "lost_by_metrics": {reason: count for reason, count in counted.items() if count},
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--kind", default="qwen3.5")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    plan = Plan.draw(options.clients, options.rounds, options.seed)
    told = run(options.kind, plan, options.share)
    print(json.dumps(told))
    is_explained = told["lost_by_response"] == told["lost_by_metrics"]
    return int(told["of_best"] < GOOD or not is_explained)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
