"""How long the masks of a step take, on this processor:

    pip download --no-deps dashscope && unzip dashscope-*.whl
    python -m tests.measures.mask_times --vocabulary dashscope/resources/qwen.tiktoken

Rows walk at random through the schema of `manyroots bench decode --structured`, each with its next
token drawn among those that its mask allows; the thread's own time is counted. Twice each, in turn:
with llguidance's own sets of tokens, with those of `grammar/vocabulary.py`, and with these and
`grammar/bounded_strings.py`.
"""

from __future__ import annotations

import argparse
import base64
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer

from manyroots.bench.decode import SHAPE
from manyroots.grammar.cache import GrammarCache
from manyroots.grammar.rows import GrammarRows
from manyroots.grammar.vocabulary import SLICES, Vocabulary

SKIPPED = 5
"""Steps in which the grammar is learned."""


@dataclass(frozen=True, slots=True)
class Sliced(Vocabulary):
    slices: Sequence[str] = ()

    def tokenizer(self) -> LLTokenizer:
        return Vocabulary.tokenizer(self).with_slices(list(self.slices))


def read_vocabulary(path: str, slices: Sequence[str]) -> Sliced:
    lines = Path(path).read_bytes().split(b"\n")
    pieces = [base64.b64decode(line.split()[0]) for line in lines if line.strip()] + [b"<end>"]
    index = {piece: token for token, piece in enumerate(pieces)}
    end = len(pieces) - 1

    def encode(text: str) -> list[int]:
        return [index[bytes([byte])] for byte in text.encode()]

    return Sliced(pieces, (end,), (end,), encode, slices)


def times(vocabulary: Sliced, num_rows: int, num_steps: int, *, walks: bool) -> list[float]:
    """Milliseconds for all masks of each step. `walks`: bounded strings as any other place."""
    grammar = GrammarCache(lambda: vocabulary).compile(SHAPE)
    if walks:
        grammar._without_limits = None
    num_tokens = len(vocabulary.pieces)
    rows, rng = GrammarRows(num_tokens), np.random.default_rng(0)
    known = {row: np.zeros(0, np.int32) for row in range(num_rows)}
    for row in known:
        rows.begin(row, grammar, 0)
    found = []
    for _ in range(num_steps):
        began = time.thread_time()
        masks, failures = rows.masks(known)
        found.append(1000 * (time.thread_time() - began))
        assert not failures, failures
        for row in known:
            bits = np.unpackbits(masks[row].view(np.uint8), bitorder="little")[:num_tokens]
            token = rng.choice(np.flatnonzero(bits))
            known[row] = np.append(known[row], token).astype(np.int32)
    return found[SKIPPED:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", required=True, help="a file of tiktoken's")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    kinds = (
        ("llguidance's sets", LLTokenizer.general_slices(), True),
        ("our sets", SLICES, True),
        ("our sets, bounded strings", SLICES, False),
    )
    for name, slices, walks in 2 * kinds:
        vocabulary = read_vocabulary(options.vocabulary, slices)
        took = times(vocabulary, options.rows, options.steps, walks=walks)
        print(
            f"{name}: {options.rows} masks take {statistics.mean(took):.2f} ms, "
            f"{statistics.median(took):.2f} in the middle, "
            f"{statistics.quantiles(took, n=10)[-1]:.2f} in one step of ten",
            flush=True,
        )


if __name__ == "__main__":
    main()
