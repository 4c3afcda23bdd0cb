"""Loads, replacements and unloads under streams: `python -m tests.soaks.adapter_churn 10000`.

A real engine whose blocks hold a few of the adapters serves streams all the time, while
names are loaded, replaced with other weights and unloaded. Each request's tokens are compared with
those of the weights that its name had when it was submitted, computed alone.

The changes come in parts, all in one engine. After each part every name is unloaded, and nothing
may be left: no block, slot, host copy or page. Prints a line of JSON for each part; exits 1 if
anything is wrong. `--from-part 12` continues a run that was interrupted after part 11: a part's
changes depend on its number and the seed alone.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from manyroots.sampling import SamplingParams
from tests.helpers.adapter_engine import AdapterEngine, TinyWorld
from tests.helpers.adapter_folders import Recipe

NAMES = tuple(f"name-{number}" for number in range(8))
RECIPES = {
    f"c{number}": Recipe(rank=(1, 2, 8, 16)[number % 4], modules=modules, seed=number)
    for number, modules in enumerate(
        [("q_proj",), ("q_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj"), ("o_proj",)] * 3
    )
}
PROMPTS = tuple([5, number, 7, 11] for number in range(3))
NUM_BLOCKS = 5
MAX_STREAMS = 12
PART_CHANGES = 250
STEPS_PER_CHANGE = 4
"""After each change, so that streams run however fast its files are read."""
LONGEST = 24


class Churn:
    """One engine, and what it should say."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._seed = seed
        self.rng = random.Random(f"churn {seed}")
        world = TinyWorld(folder, RECIPES)
        self._alone = AdapterEngine(world, names={text: text for text in RECIPES}, max_loras=1)
        self._expected: dict[tuple[str, int], list[int]] = {}
        self.engine = AdapterEngine(world, num_blocks=NUM_BLOCKS, adapter_quantum_steps=2)
        self.contents: dict[str, str] = {}
        """What each name means now."""
        self._asked: dict[int, tuple[str, int, int]] = {}
        """Content, prompt and length of each request that is not over."""
        self._next = 0
        self.counts: Counter[str] = Counter()

    def expected(self, content: str, prompt: int, length: int) -> list[int]:
        key = (content, prompt)
        if key not in self._expected:
            longest = SamplingParams(max_tokens=LONGEST, temperature=0, ignore_eos=True)
            number = len(self._expected)
            self._alone.submit(number, PROMPTS[prompt], content, sampling=longest)
            self._alone.run()
            self._expected[key] = self._alone.tokens(number)
        return self._expected[key][:length]

    def change(self) -> None:
        """Load, replace or unload one name, while streams go on."""
        name = self.rng.choice(NAMES)
        loaded = name in self.contents
        if loaded and self.rng.random() < 0.4:
            op, kind = self.engine.unload(name), "unloads"
            del self.contents[name]
        else:
            content = self.rng.choice(list(RECIPES))
            op, kind = self.engine.load(name, content, in_place=loaded), "loads"
            kind = "replacements" if loaded else kind
            self.contents[name] = content
        self.counts[kind] += 1
        while op not in self.engine.replies:
            if not self.engine.loop.has_work and self.engine.loop.is_reading:
                self.engine.loop.wait_for_read()
            self.step()
        assert self.engine.replies[op].error is None, self.engine.replies[op]

    def ask(self) -> None:
        name = self.rng.choice(list(self.contents))
        prompt, length = self.rng.randrange(len(PROMPTS)), self.rng.randint(1, LONGEST)
        sampling = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
        self.engine.submit(self._next, PROMPTS[prompt], name, sampling=sampling)
        self._asked[self._next] = (self.contents[name], prompt, length)
        self._next += 1

    def step(self) -> None:
        self.engine.step()
        for number in [n for n in self._asked if self.engine.is_over(n)]:
            want = self.expected(*self._asked.pop(number))
            given = self.engine.tokens(number)
            assert given == want, f"request {number} got {given} for {want}"
            del self.engine.outputs[number]
            self.counts["requests"] += 1
            self.counts["tokens"] += len(given)

    def run(self, num_changes: int, part: int = 0) -> None:
        """One part: changes under streams, after which nothing may be left."""
        self.rng = random.Random(f"churn {self._seed} {part}")
        for _ in range(num_changes):
            self.change()
            while self.contents and len(self._asked) < self.rng.randint(1, MAX_STREAMS):
                self.ask()
            for _ in range(STEPS_PER_CHANGE):
                self.step()
        for name in list(self.contents):
            self.engine.unload(name)
        self.contents.clear()
        while self._asked or self.engine.loop.has_work:
            self.step()
        self.engine.run()
        self.engine.assert_nothing_of_adapters_is_left()
        self.engine.replies.clear()
        slots = self.engine.residency.slots
        assert slots.num_free_blocks == NUM_BLOCKS, "a block is lost"
        stats = self.engine.loop.stats().adapters
        assert stats is not None
        self.counts["evictions"] = stats.total_device_evictions

    def close(self) -> None:
        self.engine.close()
        self._alone.close()


def run_parts(churn: Churn, num_changes: int, first_part: int) -> None:
    """All parts from this one on; the last may be shorter."""
    for part, begin in enumerate(range(0, num_changes, PART_CHANGES)):
        if part < first_part:
            continue
        before, begin_s = churn.counts.copy(), time.process_time()
        churn.run(min(PART_CHANGES, num_changes - begin), part)
        report: dict[str, float] = {"part": part, **(churn.counts - before)}
        report["processor_s"] = round(time.process_time() - begin_s, 1)
        report["most_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(json.dumps(report), flush=True)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soaks.adapter_churn")
    parser.add_argument("changes", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from-part", type=int, default=0)
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        churn = Churn(Path(folder), args.seed)
        try:
            run_parts(churn, args.changes, args.from_part)
        except AssertionError as error:
            print(dict(churn.counts), "wrong:", error)
            return 1
        finally:
            churn.close()
    print(dict(churn.counts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
