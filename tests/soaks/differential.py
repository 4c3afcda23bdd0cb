"""Cached against cold: random conversations through two real engines around one tiny model.

    python -m tests.soaks.differential [--mix NAME] [--traces 500] [--seed 0] [--results FILE]
                                       [--ranks 2] [--tier host|files|redis] [--part 25]
                                       [--jobs N] [--minutes M]

The warm engine reuses prefixes in so little memory that it must evict and retract, with chunked
prompts and up to four conversations at once; where layers have states, with fewer checkpoints than
these make. The cold engine computes every prompt with its answer alone, in one step, with reuse
off. Each token of the answer must be the one that the cold engine finds likeliest there, except
where its two best are closer than rounding may move them. Lengths lie around pages, windows, chunks
and checkpoints; three adapters and the base share texts.

With a tier, pages that leave the device are found there; with one that lasts, the warm engine is
started again after its traces and finds what the last one stored of the first half. With ranks, the
warm engine is divided over so many processes.

Prints JSON: what was compared, and how much of it was reused. Every 25 traces get engines of their
own and a line in the file of results, if there is one; what is there already is not run again. So
the same command continues a run that was ended. Exits with 1 where a part differs, and with 2 where
`--minutes` were over before all parts began. Needs torch, numpy, safetensors and transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from manyroots import LLM, LoRARequest, SamplingParams
from manyroots.distributed.shard import Shard
from manyroots.kernels.tolerances import TOLERANCES
from manyroots.models.families import families
from manyroots.models.sharding import rank_spec
from manyroots.models.spec import ModelSpec
from tests.helpers.adapter_folders import Recipe, write_adapter
from tests.helpers.patience import PATIENCE_S
from tests.helpers.quick_tiers import worth_loading
from tests.unit.models.tiny import load_tiny, save_tiny
from tests.unit.store.tiers import RedisServer
from tests.unit.text.tiny_tokenizer import tiny_backend

PAGE, CHUNK, WINDOW = 4, 24, 11
MAX_LEN = 160
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
BLOCK = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
RECURRENT = (
    "in_proj", "out_proj", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b",
    "in_proj_a", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj",
)  # fmt: skip
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
COMPRESSED = ("kv_proj", "weights_proj", "o_b_proj")
INDEX = ("wq_b", "wk")
ADAPTERS = {
    "all": Recipe(
        rank=8, modules=(*ATTENTION, *LATENT, *COMPRESSED, *INDEX, *BLOCK, *RECURRENT), seed=1
    ),
    "few": Recipe(
        rank=3, modules=("q_proj", "kv_b_proj", "down_proj", *RECURRENT), alpha=4, seed=2
    ),
    "ends": Recipe(rank=5, modules=(*ATTENTION, "out_proj", "embed_tokens", "lm_head"), seed=3),
}
"""Modules that a model has not are left out."""
TYPES = {"f": "full_attention", "w": "sliding_attention", "c": "conv"}


def _types(pattern: str) -> list[str]:
    return [TYPES[letter] for letter in pattern]


MIXES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "window": ("mistral", {"sliding_window": WINDOW}),
    "full and window": (
        "qwen2",
        {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "five to one": (
        "gemma3",
        {"sliding_window": WINDOW, "num_hidden_layers": 6, "layer_types": _types("wwwwwf")},
    ),
    "sinks and experts": (
        "gpt-oss",
        {"sliding_window": WINDOW, "num_hidden_layers": 4, "layer_types": _types("wfwf")},
    ),
}
LATENT_MIXES: dict[str, tuple[str, dict[str, Any]]] = {
    "latents": ("deepseek-v2-lite", {}),
    "latents and groups": ("deepseek-v2", {}),
    "latents and sigmoids": ("deepseek-v3", {}),
    "latents and few groups": ("glm4-moe-lite", {}),
    "latents and dense blocks": ("minicpm3", {}),
}
INDEX_MIXES: dict[str, tuple[str, dict[str, Any]]] = {
    "latents and an index": ("deepseek-v32", {}),
    "latents and a shared index": ("glm-moe-dsa", {}),
}
COMPRESSED_MIXES: dict[str, tuple[str, dict[str, Any]]] = {
    "compressed groups": ("deepseek-v4", {"sliding_window": WINDOW}),
}
RECURRENT_MIXES: dict[str, tuple[str, dict[str, Any]]] = {
    "convolutions": ("lfm2", {"num_hidden_layers": 4, "layer_types": _types("cfcc")}),
    "delta nets": ("qwen3.5", {}),
    "delta nets and experts": ("qwen3-next", {"moe_intermediate_size": 20}),
    "delta nets, other experts": ("qwen3.5-moe", {"moe_intermediate_size": 20}),
    "mamba": ("granite-h", {}),
    "mamba beside attention": ("falcon-h1", {}),
    "delta attention and latents": ("kimi-linear", {}),
}
"""A kind of tiny model for each mix of families."""
ALL_MIXES = {**MIXES, **LATENT_MIXES, **INDEX_MIXES, **COMPRESSED_MIXES, **RECURRENT_MIXES}

KV_BYTES_SHARE = 0.28
"""What the warm engine has of the memory that four conversations of full length would take: little
more than one of them, so that answers which grow take each other's pages away."""
LESS_SHARE = {"compressed groups": 0.12}
"""The same where most of a page's bytes are of windows, of which a conversation holds few pages.
Few traces retract: 1 in 11 with this share, none in 5 with 0.10."""
SHORT = (1, 2, PAGE - 1, PAGE, PAGE + 1, 9)
LONG = (17, 26, 41)
"""Tokens that are asked for."""
TRACES_OF_A_PART = 25
TIERS = ("none", "host", "files", "redis")
NUM_HOST_PAGES = 120
"""Four times what the device has, and less than a run's traces have."""
NUM_CHECKPOINTS, INTERVAL = 7, 3 * PAGE
"""What it has of saved states, where there are any: fewer than four conversations make."""


@dataclass
class Found:
    """What was compared."""

    mix: str
    traces: int = 0
    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retractions: int = 0
    evicted_pages: int = 0
    """At least: those that were filled and that the pool has no room for."""
    host_tokens: int = 0
    """Of the cached ones: from host memory."""
    storage_tokens: int = 0
    near_ties: int = 0
    """Tokens that are the cold engine's second best, where its two best are as good as equal."""


def page_bytes_of(spec: ModelSpec) -> int:
    """A page of all layers."""
    own = (family for family in families(spec.layers) if not family.is_state)
    return sum(family.unit_bytes(PAGE, torch.float32) for family in own)


class Engines:
    """A warm and a cold engine of one mix."""

    def __init__(self, folder: Path, mix: str, ranks: int = 1, tier: str = "none") -> None:
        self._tier, self._redis = tier, None
        kind, changes = ALL_MIXES[mix]
        self.model = folder / "model"
        save_tiny(self.model, kind, vocab_size=300, **changes)
        tiny_backend().save(str(self.model / "tokenizer.json"))
        decoder = load_tiny(self.model)
        self.adapters: dict[str, str] = {}
        for name, recipe in ADAPTERS.items():
            write_adapter(folder / name, decoder.adapter_targets(), recipe)
            self.adapters[name] = str(folder / name)
        page_bytes = page_bytes_of(decoder.spec)
        state = sum(f.unit_bytes(PAGE, decoder.dtype) for f in decoder.families if f.is_state)
        needed = 4 * -(-MAX_LEN // PAGE) * page_bytes
        # A rank has fewer heads of most pages, and all of those that heads share.
        of_rank = page_bytes_of(rank_spec(decoder.spec, Shard(0, ranks)))
        share = LESS_SHARE.get(mix, KV_BYTES_SHARE) * of_rank / page_bytes
        self._settings: dict[str, Any] = {
            "kv_cache_memory_bytes": int(needed * share) + (4 + NUM_CHECKPOINTS) * state // ranks,
            "checkpoint_memory_bytes": NUM_CHECKPOINTS * state // ranks,
            "checkpoint_interval_tokens": INTERVAL,
            "max_num_batched_tokens": CHUNK,
            "max_num_seqs": 4,
            "tensor_parallel_size": ranks,
            **self._tier_settings(folder),
        }
        self.warm = self._start(**self._settings)
        self.cold = self._start(
            kv_cache_memory_bytes=4 * (needed + state),
            max_num_batched_tokens=MAX_LEN,
            max_num_seqs=1,
            enable_prefix_caching=False,
        )

    def _tier_settings(self, folder: Path) -> dict[str, Any]:
        match self._tier:
            case "none":
                return {}
            case "host":
                return {"num_host_pages": NUM_HOST_PAGES}
            case "files":
                url = f"file://{folder / 'stored'}"
            case _:
                self._redis = RedisServer(folder)
                url = self._redis.url
        # A busy machine's own delays are no faults.
        return {"kv_storage": url, "kv_storage_timeout_s": PATIENCE_S}

    def restart(self) -> None:
        """The warm engine ends, and another one finds what it stored."""
        self.warm.close()
        self.warm = self._start(**self._settings)

    def _start(self, **settings: Any) -> LLM:
        return LLM(
            str(self.model), dtype="float32", enable_lora=True, max_loras=2, block_size=PAGE,
            max_model_len=MAX_LEN, **settings,
        )  # fmt: skip

    def answers(self, prompts: list[list[int]], names: list[str | None], count: int) -> list[Any]:
        """The warm engine's, side by side."""
        greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        return self.warm.generate(prompts, greedy, lora_request=self._requests(names))

    def cold_logprobs(self, tokens: list[int], name: str | None) -> list[Any]:
        """After each of `tokens` but the last: the two best tokens, with their logprobs."""
        once = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=2)
        [output] = self.cold.generate([tokens], once, lora_request=self._requests([name]))
        behind: Any = output.prompt_logprobs
        ranked = [sorted(scores.items(), key=_rank) for scores in behind[1:]]
        return [[(token, score.logprob) for token, score in scores[:2]] for scores in ranked]

    def _requests(self, names: list[str | None]) -> list[LoRARequest | None]:
        return [
            None if name is None else LoRARequest(name, 1, self.adapters[name]) for name in names
        ]

    def close(self) -> None:
        self.warm.close()
        self.cold.close()
        if self._redis is not None:
            self._redis.stop()


def _rank(entry: tuple[int, Any]) -> int:
    return int(entry[1].rank)


def run(mix: str, seeds: range, ranks: int = 1, tier: str = "none") -> Found:
    """Every trace of these seeds, on engines that keep what they have cached between them."""
    found = Found(mix)
    # With tiers that last: the first half again, in another engine.
    parts = [seeds] if tier in ("none", "host") else [seeds, seeds[: len(seeds) // 2]]
    with tempfile.TemporaryDirectory() as folder, worth_loading():
        engines = Engines(Path(folder), mix, ranks, tier)
        try:
            for number, part in enumerate(parts):
                if number > 0:
                    engines.restart()
                for seed in part:
                    _trace(engines, random.Random(f"{mix} {seed}"), found, f"{mix}, seed {seed}")
                    found.traces += number < 1
                stats = engines.warm.stats()
                found.retractions += stats.total_retractions
                found.host_tokens += stats.total_host_hit_tokens
                found.storage_tokens += stats.total_storage_hit_tokens
            computed = found.prompt_tokens - found.cached_tokens
            found.evicted_pages = max(0, computed // PAGE - stats.num_pages)
        finally:
            engines.close()
    return found


def _trace(engines: Engines, rng: random.Random, found: Found, where: str) -> None:
    """Some conversations side by side, each some turns long; they begin with common texts."""
    heads = [_text(rng, _length(rng)) for _ in range(2)]
    names = [rng.choice([None, *ADAPTERS]) for _ in range(rng.randint(1, 4))]
    histories = [list(rng.choice(heads)) for _ in names]
    for _ in range(rng.randint(2, 4)):
        count = rng.choice(LONG if rng.random() < 0.4 else SHORT)
        open_ones = []
        for index, history in enumerate(histories):
            history += _text(rng, _length(rng))
            if len(history) + count < MAX_LEN:
                open_ones.append(index)
        if not open_ones:
            return
        prompts = [histories[index] for index in open_ones]
        asked = [names[index] for index in open_ones]
        answers = engines.answers(prompts, asked, count)
        for index, answer in zip(open_ones, answers, strict=True):
            name, whole = names[index], histories[index] + answer.outputs[0].token_ids
            cold = engines.cold_logprobs(whole, name)[len(histories[index]) - 1 :]
            _compare(answer, cold, found, f"{where}, {name}, {histories[index]}")
            histories[index] = whole
        if rng.random() < 0.2:
            # The same text under other weights: it must find nothing of the first.
            names = [rng.choice([None, *ADAPTERS]) for _ in names]


def _length(rng: random.Random) -> int:
    base = rng.choice([PAGE, 2 * PAGE, WINDOW, 2 * WINDOW, CHUNK, 1])
    return max(1, base + rng.choice([-1, 0, 1]))


def _text(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 300) for _ in range(count)]


def _compare(warm: Any, cold: list[Any], found: Found, where: str) -> None:
    """`cold`: the result after the prompt and after each token of the answer but the last."""
    found.requests += 1
    found.prompt_tokens += len(warm.prompt_token_ids)
    found.cached_tokens += warm.num_cached_tokens
    close = 2 * TOLERANCES["logits", torch.float32].atol
    tokens = warm.outputs[0].token_ids
    for at, (token, behind) in enumerate(zip(tokens, cold, strict=True)):
        (best, score), (second, next_score) = behind
        if token == best:
            found.tokens += 1
            continue
        if token != second or score - next_score > close:
            raise AssertionError(
                f"{where}: token {at} of {tokens} is {token} from the cache and {best} cold"
            )
        found.near_ties += 1


@dataclass(frozen=True, slots=True)
class Part:
    """Traces that one pair of engines runs."""

    mix: str
    first: int
    end: int
    ranks: int
    tier: str

    def run(self) -> dict[str, Any]:
        """A line of the results; with `failure` where a token differs."""
        try:
            found = run(self.mix, range(self.first, self.end), self.ranks, self.tier)
        except Exception as error:  # other parts run, whatever this one ends with
            return {**asdict(self), "failure": f"{type(error).__name__}: {error}"}
        return {**asdict(self), **asdict(found)}

    def is_of(self, line: dict[str, Any]) -> bool:
        return line.items() >= asdict(self).items()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mix", choices=sorted(ALL_MIXES), action="append")
    parser.add_argument("--traces", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=int, default=TRACES_OF_A_PART, help="traces on one engine")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tier", choices=TIERS, default="none")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--minutes", type=float, help="begin no part after this time")
    parser.add_argument("--results", type=Path, help="a line for each part, to go on from")
    options = parser.parse_args(arguments)
    ends = range(options.seed, options.seed + options.traces)
    parts = [
        Part(mix, first, min(first + options.part, ends.stop), options.ranks, options.tier)
        for mix in options.mix or ALL_MIXES
        for first in ends[:: options.part]
    ]
    lines = _known(options.results)
    missing = [part for part in parts if not any(part.is_of(line) for line in lines)]
    until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    failures = []
    for line in _lines(missing, options.jobs, until):
        if "failure" in line:
            failures.append(line["failure"])
            print(line["failure"], file=sys.stderr, flush=True)
            continue
        lines.append(line)
        if options.results is not None:
            with options.results.open("a") as file:
                file.write(json.dumps(line) + "\n")
    done = [line for line in lines if any(part.is_of(line) for part in parts)]
    for mix in options.mix or ALL_MIXES:
        print(json.dumps(_total(mix, options, done)), flush=True)
    return 1 if failures else 2 if len(done) < len(parts) else 0


def _lines(parts: list[Part], jobs: int, until: float | None) -> Iterator[dict[str, Any]]:
    """The parts' results, as they are there; none begins after `until`."""
    if jobs == 1:
        found = (_run_in_time(part, until) for part in parts)
        yield from (line for line in found if line is not None)
        return
    # New processes: a fork would carry over the threads and locks of the caller.
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        futures = [pool.submit(_run_in_time, part, until) for part in parts]
        for future in as_completed(futures):
            line = future.result()
            if line is not None:
                yield line


def _run_in_time(part: Part, until: float | None) -> dict[str, Any] | None:
    return None if until is not None and time.monotonic() > until else part.run()


def _total(mix: str, options: argparse.Namespace, lines: list[dict[str, Any]]) -> dict[str, Any]:
    total: Counter[str] = Counter()
    names = [name for name in Found.__dataclass_fields__ if name != "mix"]
    for line in lines:
        if line["mix"] == mix:
            total.update({name: line[name] for name in names})
    return {"mix": mix, "ranks": options.ranks, "tier": options.tier, **total}


def _known(results: Path | None) -> list[dict[str, Any]]:
    """Lines of the file; not one that the end of a run cut off."""
    if results is None or not results.exists():
        return []
    found, whole = [], results.read_text()
    if not whole.endswith("\n"):
        results.write_text(whole + "\n")
    for text in whole.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(text))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
