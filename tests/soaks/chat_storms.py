"""Talks that fork, are edited, cut short and go on, from tiers that are always too small.

    python -m tests.soaks.chat_storms --requests 300 [--seed 0] [--state FILE]
    python -m tests.soaks.chat_storms --requests 60 --seed 1000  (Gemma 3 270M; from 2000 on
        SmolLM2)

A seed draws a model (wide enough that a page costs more to compute than to fetch, so that storage
is hit), sizes of device, host and storage that evict all the time, and conversations over HTTP.
Each turn continues what was said, with a new question or none; parts from it somewhere; has another
word in its middle; is left by its caller half way and continues from there; or is asked of another
adapter. In the middle the server ends and starts again on what storage has. All is greedy with
log-probabilities. In the end a server that reuses nothing scores every conversation in one pass:
each token of each answer must be its first choice there, with the same log-probability.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from manyroots.config import ModelSettings
from manyroots.kernels.tolerances import TOLERANCES
from manyroots.models.source import resolve_source
from tests.e2e.conftest import API_KEY, HEADERS, Server
from tests.helpers.adapter_folders import Recipe, write_adapter
from tests.helpers.patience import PATIENCE_S
from tests.helpers.storm_folders import storm_folder
from tests.soaks.slices import command
from tests.unit.models.tiny import load_tiny, save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

PAGE, MAX_LEN, NUM_REQUESTS, NUM_CALLERS = 16, 512, 60, 5
WIDE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1536, "vocab_size": 300, "num_attention_heads": 8,
    "max_position_embeddings": MAX_LEN, "initializer_range": 0.06,
}  # fmt: skip
"""So wide that a page takes longer to compute than to read."""
MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 64}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {}, "gemma3": {"sliding_window": 64}, "mistral-window": {"sliding_window": 96},
    "gpt-oss": {"sliding_window": 64, "intermediate_size": 256}, "qwen3-moe": {}, "lfm2": {},
    "qwen3.5": {}, "qwen3-next": {}, "granite-h": MAMBA,
    "falcon-h1": {**MAMBA, "mamba_d_ssm": 1024},
}  # fmt: skip
REAL = {1: "gemma3-270m", 2: "smollm2-135m-instruct"}
"""By thousands of the seed."""
NAMES = ("red", "green")
CLOSE = 2 * TOLERANCES["self_check", torch.float32].atol


class World:
    """A model with adapters for it, and what a page and a state of it take."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = storm_folder("chats")
        self.model = name
        if name in KINDS:
            self.model = str(self.folder / "model")
            save_tiny(Path(self.model), name, **WIDE | KINDS[name])
            tiny_backend().save(str(Path(self.model) / "tokenizer.json"))
        decoder = load_tiny(Path(resolve_source(ModelSettings(model=self.model)).path))
        size = 0.05 if name in KINDS else 0.02
        for seed, adapter in enumerate(NAMES):
            recipe = Recipe(rank=4, modules=("q_proj", "v_proj", "o_proj"), scale=size, seed=seed)
            write_adapter(self.adapter(adapter), decoder.adapter_targets(), recipe)
        self.vocab_size = decoder.spec.vocab_size
        sizes = [(f.is_state, f.unit_bytes(PAGE, decoder.dtype)) for f in decoder.families]
        self.num_families = len(sizes)
        self.page_bytes = sum(count for is_state, count in sizes if not is_state)
        self.state_bytes = sum(count for is_state, count in sizes if is_state)

    def adapter(self, name: str) -> Path:
        return self.folder / "adapters" / name

    def flags(self, **more: Any) -> list[str]:
        given = {
            "served-model-name": "base", "api-key": API_KEY, "block-size": PAGE,
            "max-model-len": MAX_LEN, **more,
        }  # fmt: skip
        adapters = [f"{name}={self.adapter(name)}" for name in NAMES]
        words = [text for name, value in given.items() for text in (f"--{name}", str(value))]
        return [self.model, *words, "--enable-lora", "--lora-modules", *adapters]


@dataclass(frozen=True)
class Said:
    """A talk as one answer left it."""

    name: str
    """Whose answer it is: `base` or an adapter's."""
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def whole(self) -> tuple[int, ...]:
        return self.prompt + self.answer


@dataclass
class Storm:
    """What a seed asks, of one server after the other."""

    seed: int
    told: Counter[str] = field(default_factory=Counter)
    said: list[Said] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"chats {self.seed}")
        name = REAL.get(self.seed // 1000) or list(KINDS)[self.seed % len(KINDS)]
        self.world = World(name)
        self.heads = [self._text(self.rng.choice((90, 170, 240))) for _ in range(3)]
        self.flags = self._flags()

    def _text(self, count: int) -> list[int]:
        return [self.rng.randrange(3, self.world.vocab_size) for _ in range(count)]

    def _flags(self) -> list[str]:
        rng, world = self.rng, self.world
        num_pages = int(rng.choice((1.1, 1.3, 1.8)) * MAX_LEN / PAGE)
        num_states = NUM_CALLERS + rng.choice((2, 6))
        # With windows or states beside pages, the split is the server's.
        spare = 1.0 if world.num_families == 1 else 1.4
        room = int(num_pages * world.page_bytes * spare) + num_states * world.state_bytes
        unit = world.page_bytes + world.state_bytes
        more: dict[str, Any] = {
            "kv-cache-memory-bytes": room, "max-num-seqs": NUM_CALLERS,
            "max-num-batched-tokens": rng.choice((48, 128, 512)),
            "max-loras": rng.choice((1, 2)), "num-host-pages": rng.choice((8, 40, 120)),
            "kv-storage": f"file://{world.folder}/store", "kv-storage-size":
            rng.choice((80, 400, 1000)) * unit / 2**30, "prefetch": "wait",
            "write-back": rng.choice(("through",) * 4 + ("reused", "eviction")),
        }  # fmt: skip
        if world.state_bytes:
            more["checkpoint-memory-bytes"] = (num_states - NUM_CALLERS) * world.state_bytes
            more["checkpoint-interval-tokens"] = rng.choice((PAGE, 4 * PAGE))
        return world.flags(**more)

    async def run(self, num_requests: int) -> None:
        todo: Any = iter(range(num_requests))
        for _ in range(2):  # the second finds what the first has left in storage
            until = todo.__length_hint__() // 2 if todo.__length_hint__() == num_requests else 0
            await self._serve(todo, until)
        await self._compare()

    async def _serve(self, todo: Any, until: int) -> None:
        async with Serving(self.flags) as serving:

            async def caller() -> None:
                while todo.__length_hint__() > until and next(todo, None) is not None:
                    await self._turn(serving.client)

            async with asyncio.TaskGroup() as group:
                for _ in range(NUM_CALLERS):
                    group.create_task(caller())
            await serving.check_quiet()

    async def _turn(self, client: httpx.AsyncClient) -> None:
        rng = self.rng
        name, prompt = self._next()
        asked = min(rng.choice((1, 4, 20, 40)), MAX_LEN - len(prompt))
        body = {
            "model": name, "prompt": prompt, "max_tokens": asked, "temperature": 0, "logprobs": 0,
            "ignore_eos": True, "return_token_ids": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        leaves_after = rng.randrange(asked) if rng.random() < 0.15 else None
        tokens: list[int] = []
        scores: list[float] = []
        usage: dict[str, Any] = {}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, (await answer.aread()).decode()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                usage = event.get("usage") or usage
                for part in event["choices"]:
                    tokens += part["token_ids"]
                    scores += part["logprobs"]["token_logprobs"] if part["logprobs"] else []
                if leaves_after is not None and len(tokens) >= leaves_after:
                    self.told["left"] += 1
                    break
        assert len(tokens) == len(scores), (tokens, scores)
        assert leaves_after is not None or len(tokens) == asked, body
        self.said.append(Said(name, tuple(prompt), tuple(tokens), tuple(scores)))
        self.told["requests"] += 1
        self.told["prompt tokens"] += len(prompt)
        details = usage.get("prompt_tokens_details") or {}
        for tier, count in (details.get("cached_by_tier") or {}).items():
            self.told[f"{tier} tokens"] += count
            self.told[f"{tier} hits"] += count > 0

    def _next(self) -> tuple[str, list[int]]:
        """The adapter to ask, and what to ask it."""
        rng = self.rng
        if not self.said or rng.random() < 0.12:
            return rng.choice(("base", *NAMES)), [*rng.choice(self.heads), *self._text(5)]
        recent = self.said[-12:] if rng.random() < 0.6 else self.said
        said = rng.choice(recent)
        name, whole = said.name, list(said.whole)
        how = rng.random()
        if how < 0.45:  # the next question
            whole += self._text(rng.choice((1, 9, 30, 60)))
        elif how < 0.60:
            pass  # goes on where it ended, or was left
        elif how < 0.78:  # parts from it
            at = rng.randrange(len(whole) // 3, len(whole)) + 1
            whole = [*whole[:at], *self._text(rng.choice((1, 9)))]
        elif how < 0.88:  # another word in its middle
            whole[rng.randrange(len(whole))] = self._text(1)[0]
        else:
            name = rng.choice(("base", *NAMES))
        if len(whole) > MAX_LEN - 2:
            whole = whole[: rng.randrange(PAGE, MAX_LEN // 2)]
        return name, whole

    # In the end

    async def _compare(self) -> None:
        """One pass for each talk that no other goes on from."""
        room = 2 * MAX_LEN // PAGE * self.world.page_bytes * 2 + 4 * self.world.state_bytes
        cold = self.world.flags(**{"max-num-seqs": 1, "kv-cache-memory-bytes": room})
        todo = set(self.said)
        async with Serving([*cold, "--no-enable-prefix-caching"]) as serving:
            while todo:
                longest = max(todo, key=lambda said: (len(said.whole), said.name, said.whole))
                body = {
                    "model": longest.name, "prompt": longest.whole[: MAX_LEN - 1],
                    "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1,
                }  # fmt: skip
                answer = await serving.client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                scores = answer.json()["choices"][0]["prompt_logprobs"]
                within = [
                    said for said in todo
                    if said.name == longest.name and longest.whole[: len(said.whole)] == said.whole
                ]  # fmt: skip
                for said in within:
                    self._check(said, scores)
                todo.difference_update(within)
                self.told["passes"] += 1

    def _check(self, said: Said, scores: list[dict[str, Any]]) -> None:
        for at, (token, logprob) in enumerate(zip(said.answer, said.logprobs, strict=True)):
            place = len(said.prompt) + at
            if place >= len(scores):
                return
            mine = scores[place][str(token)]
            best = max(entry["logprob"] for entry in scores[place].values())
            where = f"{self.world.name}: token {at} of {len(said.answer)}, {said}"
            assert best - mine["logprob"] <= CLOSE, f"{scores[place]}: {where}"
            assert abs(mine["logprob"] - logprob) <= CLOSE, f"{logprob}, {mine} cold: {where}"
            self.told["near ties"] += mine["rank"] != 1
            self.told["tokens compared"] += 1


class Serving:
    """A server from its start to its end."""

    def __init__(self, flags: list[str]) -> None:
        self._server = Server(*flags)
        self.client = httpx.AsyncClient(
            base_url=self._server.url, headers=HEADERS, timeout=PATIENCE_S
        )

    async def __aenter__(self) -> Serving:
        try:
            await asyncio.to_thread(self._server.wait_until_ready)
        except BaseException:
            self._server.stop()
            raise
        return self

    async def check_quiet(self) -> None:
        await asyncio.to_thread(self._server.wait_until_idle)

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        self._server.process.terminate()  # in peace: what is on its way to storage arrives
        try:
            await asyncio.to_thread(self._server.process.wait, PATIENCE_S)
        finally:
            self._server.stop()


def run_seed(seed: int, num_requests: int = NUM_REQUESTS) -> tuple[dict[str, int], str | None]:
    """One storm: counts, and what was wrong."""
    storm = None
    try:
        storm = Storm(seed)
        asyncio.run(storm.run(num_requests))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        print(f"seed {seed}: {error!r:.2000}", file=sys.stderr, flush=True)
        return {}, traceback.format_exc()
    finally:
        if storm is not None:
            shutil.rmtree(storm.world.folder, ignore_errors=True)
    return dict(storm.told), None


def main(argv: list[str] | None = None) -> int:
    return command("tests.soaks.chat_storms", run_seed, "requests", description=__doc__, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
