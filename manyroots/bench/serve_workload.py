"""What `bench serve` sends: conversations of one or more turns, as text, so that any server
understands it.

A conversation's turns follow each other, each with everything said before. Lengths are counted in
words of a small vocabulary, most of which are one token; what a server counts is in the report,
too. Or the requests of one of `bench traffic`'s cases, token by token, so that both can be
compared.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

from manyroots.bench.traffic_cases import SAMPLED as CASE_SAMPLED
from manyroots.bench.traffic_cases import TrafficCase
from manyroots.bench.words import TEXT

Range = tuple[int, int]
SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.8}
"""What every server of this kind knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeWorkload:
    """Drawn evenly from ranges, from one seed."""

    num_requests: int
    """Turns of all conversations together."""
    prompt_words: Range
    output_tokens: Range
    turns: int = 1
    num_heads: int = 0
    head_words: int = 0
    models: tuple[str, ...] = ()
    """Names to ask for: the base's, or adapters'; none: the server's first."""
    zipf: float = 0.0
    """Name number i is asked for in proportion to (i + 1) to the power of minus this."""
    is_sampled: bool = False
    is_chat: bool = False
    ignore_eos: bool = True
    """Not every server knows the field."""
    seed: int = 0
    case: TrafficCase | None = None
    """What is sent instead, by token; each seed has a cache of its own."""
    vocab_size: int = 0
    """Of the case's tokens."""

    def conversations(self) -> list[Conversation]:
        if self.case is not None:
            return self._case_conversations(self.case)
        rng = random.Random(self.seed)
        words = TEXT.split()

        def said(count: int) -> str:
            return " ".join(rng.choice(words) for _ in range(count))

        heads = [said(self.head_words) for _ in range(max(1, self.num_heads))]
        popularity = [(i + 1) ** -self.zipf for i in range(len(self.models))]
        conversations: list[Conversation] = []
        left = self.num_requests
        while left > 0:
            number = len(conversations)
            model = rng.choices(self.models, popularity)[0] if self.models else None
            turns = tuple(
                Turn(said(rng.randint(*self.prompt_words)), rng.randint(*self.output_tokens))
                for _ in range(min(self.turns, left))
            )
            conversations.append(Conversation(number, model, heads[number % len(heads)], turns))
            left -= len(turns)
        return conversations

    def _case_conversations(self, case: TrafficCase) -> list[Conversation]:
        submits = case.submits(self.vocab_size, "", itertools.count(1), with_adapters=False)
        return [
            Conversation(number, self.models[0] if self.models else None, "", (turn,))
            for number, turn in enumerate(
                Turn(
                    list(submit.prompt), min(submit.sampling.max_tokens or 1, self.output_tokens[1])
                )
                for submit in submits[: self.num_requests]
            )
        ]

    def body(
        self, conversation: Conversation, history: list[dict[str, Any]], turn: Turn
    ) -> dict[str, Any]:
        """A request for the next turn."""
        drawn = SAMPLED if self.case is None else CASE_SAMPLED
        sampling = {**drawn, "seed": conversation.number} if self.is_sampled else {"temperature": 0}
        body: dict[str, Any] = {
            "model": conversation.model,
            "max_tokens": turn.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling,
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.case is not None:
            body |= {"prompt": turn.said, "cache_salt": f"bench-{self.seed}"}
        elif self.is_chat:
            body["messages"] = [*history, {"role": "user", "content": turn.said}]
        else:
            said = (*(message["content"] for message in history), turn.said)
            body["prompt"] = " ".join(map(str, said))
        return body


@dataclass(frozen=True, slots=True)
class Turn:
    said: str | list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    number: int
    model: str | None
    head: str
    turns: tuple[Turn, ...]

    def opening(self) -> list[dict[str, str]]:
        """What stands before its first turn."""
        return [{"role": "system", "content": self.head}] if self.head else []
