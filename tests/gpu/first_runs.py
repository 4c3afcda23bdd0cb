"""What the start of a server makes, and what traffic needs:
`python -m tests.gpu.first_runs [MODEL]`.

Takes the name of a model's shape (`--model-config`) or a folder. Starts an engine with random
weights and adapters, runs several kinds of traffic, each of them once, and prints a line of JSON
for each kind: the kernels that were compiled for it and the graphs that were captured for it,
because the start did not. The last line compares the graphs of the start with those that steps
used. Exits 1 if traffic had to wait for any.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

from manyroots.bench.model_configs import write_config
from manyroots.bench.random_adapters import targets_of, write_adapters
from manyroots.config import engine_settings
from manyroots.engine.build import build_engine
from manyroots.engine.loop import EngineLoop
from manyroots.ids import AdapterName, RequestId
from manyroots.messages import Submit
from manyroots.models.source import resolve_source
from manyroots.runner.first_runs import FirstRuns
from manyroots.runner.runner import ModelRunner
from manyroots.sampling import SamplingParams
from manyroots.step import FirstRun

NUM_ADAPTERS, RANK = 32, 16
NUM_REQUESTS, MAX_PROMPT, MAX_OUTPUT = 256, 1500, 64
HEAD_LEN, NUM_HEADS = 512, 16
FIRST_TOKEN, VOCAB = 3, 900
"""Token ids that every model here has."""


class Traffic:
    """Requests for one engine, by kind."""

    def __init__(
        self, *, max_prompt: int, num_requests: int, num_adapters: int = NUM_ADAPTERS
    ) -> None:
        self.rng = random.Random("first runs")
        self._max_prompt, self._num_requests = max_prompt, num_requests
        self._num_adapters = num_adapters
        self._next = 0

    def kinds(self) -> Iterator[tuple[str, list[Submit]]]:
        names = [f"a{number}" for number in range(self._num_adapters)]
        sampled = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "presence_penalty": 0.5}
        yield "base", self._mixed([None])
        yield "8 adapters", self._mixed(names[:8])
        yield "32 adapters beside base", self._mixed([*names, None])
        yield "sampled", self._mixed([None, *names[:8]], **sampled)
        yield "logprobs", self._mixed([None, *names[:8]], logprobs=3)
        yield "allowed tokens", self._mixed([None], allowed_token_ids=tuple(range(20, 60)))
        yield "shared heads", self._shared([None])
        yield "shared heads, adapters", self._shared(names[:NUM_HEADS])
        yield "one short request", self._mixed([None])[:1]
        for length in (7, 120):
            few = self._request(self._tokens(length), names[0], {})
            yield f"{length} tokens, an adapter", [few]

    def _mixed(self, owners: Sequence[str | None], **sampling: Any) -> list[Submit]:
        """Prompts of all lengths, answers that end one after the other."""
        return [
            self._request(self._tokens(self.rng.randint(1, self._max_prompt)), owner, sampling)
            for owner in self._owners(owners)
        ]

    def _shared(self, owners: Sequence[str | None]) -> list[Submit]:
        length = min(HEAD_LEN, self._max_prompt // 2)
        heads = [self._tokens(length) for _ in range(NUM_HEADS)]
        return [
            self._request(heads[at % NUM_HEADS] + self._tokens(8), owner, {})
            for at, owner in enumerate(self._owners(owners))
        ]

    def _owners(self, owners: Sequence[str | None]) -> list[str | None]:
        return [owners[at % len(owners)] for at in range(self._num_requests)]

    def _tokens(self, count: int) -> list[int]:
        return self.rng.choices(range(FIRST_TOKEN, VOCAB), k=count)

    def _request(self, prompt: list[int], owner: str | None, sampling: dict[str, Any]) -> Submit:
        self._next += 1
        params = SamplingParams(
            **{"temperature": 0.0, **sampling},
            max_tokens=self.rng.randint(1, MAX_OUTPUT),
            ignore_eos=True,
        )
        name = None if owner is None else AdapterName(owner)
        return Submit(RequestId(self._next), prompt, None, params, self._next, (), adapter=name)


@contextmanager
def recorded() -> Iterator[list[FirstRun]]:
    """Everything that results name."""
    found: list[FirstRun] = []
    take = FirstRuns.take

    def record(runs: FirstRuns) -> tuple[FirstRun, ...]:
        taken = take(runs)
        found.extend(taken)
        return taken

    with mock.patch.object(FirstRuns, "take", record):
        yield found


def run(loop: EngineLoop, submits: Sequence[Submit]) -> list[str]:
    """Run requests to their ends; gives errors."""
    for submit in submits:
        loop.handle(submit)
    errors = []
    while loop.has_work or loop.is_reading:
        if not loop.has_work:
            loop.wait_for_read()
        errors += [str(output.error) for output in loop.step() if output.error]
    return errors


def _line(
    kind: str, found: Sequence[FirstRun], seconds: float, errors: list[str]
) -> dict[str, Any]:
    line: dict[str, Any] = {"traffic": kind, "seconds": round(seconds, 3)}
    for made in ("kernel", "graph"):
        line[f"{made}s"] = Counter(one.name for one in found if one.kind == made)
    return line | ({"errors": errors[:3]} if errors else {})


def _graphs(runner: ModelRunner, at_start: set[Any]) -> dict[str, Any]:
    if runner._graphs is None:
        return {"graphs": "none on this device"}
    used = runner._graphs.used
    return {
        "graphs_of_the_start": len(at_start),
        "of_these_used": len(at_start & used.keys()),
        "never_used": sorted(str(key) for key in at_start - used.keys()),
        "used_and_not_of_the_start": {
            str(key): count for key, count in used.items() if key not in at_start
        },
    }


def check(settings: dict[str, Any], traffic: Traffic) -> bool:
    """Whether traffic waited for nothing."""
    began_s = time.monotonic()
    engine = build_engine(engine_settings(settings))
    loop, runner = engine.loop, cast(ModelRunner, engine.loop._runner)
    at_start = set() if runner._graphs is None else set(runner._graphs._graphs)
    print(json.dumps({"start_s": round(time.monotonic() - began_s, 1)}), flush=True)
    is_good = True
    try:
        for kind, submits in traffic.kinds():
            begin_s = time.monotonic()
            with recorded() as found:
                errors = run(loop, submits)
            print(json.dumps(_line(kind, found, time.monotonic() - begin_s, errors)), flush=True)
            is_good = is_good and not found and not errors
        print(json.dumps(_graphs(runner, at_start)))
    finally:
        loop.close()
    return is_good


def main(words: list[str]) -> int:
    name = words[0] if words else "qwen3-8b"
    with tempfile.TemporaryDirectory() as folder:
        home = Path(name) if Path(name).is_dir() else write_config(name, Path(folder))
        settings: dict[str, Any] = {"model": str(home), "load_format": "dummy"}
        source = resolve_source(engine_settings(settings).model)
        paths = write_adapters(targets_of(source), Path(folder), NUM_ADAPTERS, RANK)
        settings |= {
            "max_model_len": MAX_PROMPT + MAX_OUTPUT + 64,
            "max_num_seqs": NUM_REQUESTS,
            "enable_lora": True,
            "lora_modules": tuple(f"a{number}={path}" for number, path in enumerate(paths)),
            "max_lora_rank": RANK,
        }
        traffic = Traffic(max_prompt=MAX_PROMPT, num_requests=NUM_REQUESTS)
        return 0 if check(settings, traffic) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
