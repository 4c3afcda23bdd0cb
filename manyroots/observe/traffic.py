"""The last minutes of traffic without a text: what the simulator replays.

Takes requests that have ended; gives lines of a trace. A page of tokens becomes a keyed digest of
it and of all pages before it, so that prompts can be seen to share pages and nothing else is told.
The key is drawn when the process starts, is never shown, and differs by tenant: what two tenants
have in common does not show. Fixed in size.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from manyroots.messages import FinishReason
from manyroots.observe.requests import RequestFacts

MAX_LINES = 20_000
MAX_PAGES = 400_000
"""Of all lines together: some 3 MB."""
MAX_AGE_S = 900.0
DIGEST_BITS = 48
"""Short enough for every reader of JSON; with MAX_PAGES of them, chance gives no two alike."""


class TrafficLine:
    """One sequence."""

    __slots__ = (
        "adapter", "arrival_s", "end_s", "first_token_s", "num_cached", "num_output", "num_prompt",
        "pages", "stops", "tenant",
    )  # fmt: skip

    def __init__(
        self,
        arrival_s: float,
        adapter: str | None,
        tenant: int,
        num_prompt: int,
        num_output: int,
        pages: Sequence[int],
        stops: bool,
    ) -> None:
        self.arrival_s = arrival_s
        self.adapter = adapter
        self.tenant = tenant
        self.num_prompt = num_prompt
        self.num_output = num_output
        self.pages = array("q", pages)
        self.stops = stops
        self.num_cached = 0
        """Of its prompt; told of a request's first choice."""
        self.first_token_s: float | None = None
        """Since it came."""
        self.end_s = arrival_s


@dataclass(frozen=True, slots=True)
class MeasuredTraffic:
    """Sums over the sequences of a ring."""

    num_sequences: int
    seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    first_token_s: list[float]
    """In ascending order."""


class TrafficRing:
    """The newest sequences, within limits of number, size and age."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._key = secrets.token_bytes(32)
        self._lines: deque[TrafficLine] = deque()
        self._num_pages = 0
        self._tenants: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def take(self, facts: RequestFacts) -> None:
        """A request has ended."""
        arrival_s = facts.begin_ns / 1e9
        for index, submit in enumerate(facts.submits):
            output = facts.outputs.get(index)
            if not output:
                continue
            salt = submit.salt
            pages = self._digests(salt, submit.prompt, output)
            stops = FinishReason.STOP.value in facts.finish_reasons
            line = TrafficLine(
                arrival_s, submit.adapter, self._tenant(salt), len(submit.prompt), len(output),
                pages, stops,
            )  # fmt: skip
            line.end_s = arrival_s + facts.total_s
            if index % facts.n == 0:
                line.num_cached = facts.cached.get(index, 0)
                line.first_token_s = facts.first_token_s
            self._lines.append(line)
            self._num_pages += len(pages)
        self._forget(arrival_s + facts.total_s)

    def measured(self) -> MeasuredTraffic:
        """What these sequences have seen."""
        lines = self._lines
        begin_s = min((line.arrival_s for line in lines), default=0.0)
        end_s = max((line.end_s for line in lines), default=0.0)
        return MeasuredTraffic(
            len(lines),
            end_s - begin_s,
            sum(line.num_prompt for line in lines),
            sum(line.num_cached for line in lines),
            sum(line.num_output for line in lines),
            sorted(line.first_token_s for line in lines if line.first_token_s is not None),
        )

    def lines(self) -> Iterator[str]:
        """The trace, one JSON object a line, by arrival; the first comes at 0."""
        lines = sorted(self._lines, key=lambda line: line.arrival_s)
        for line in lines:
            values = {
                "arrival": round(line.arrival_s - lines[0].arrival_s, 4),
                "page_size": self._page_size,
                "pages": line.pages.tolist(),
                "prompt_tokens": line.num_prompt,
                "output_tokens": line.num_output,
                "adapter": line.adapter,
                "tenant": line.tenant,
                "ends_by": "stop" if line.stops else "length",
            }
            yield json.dumps(values, separators=(",", ":")) + "\n"

    def _digests(self, salt: str | None, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
        """Of every page of prompt and output, the last maybe not full."""
        tokens = array("i", prompt)
        tokens.extend(output)
        data, size = tokens.tobytes(), self._page_size * tokens.itemsize
        tenant = b"none" if salt is None else b"salt" + salt.encode()
        digest = hashlib.blake2b(tenant, key=self._key, digest_size=DIGEST_BITS // 8).digest()
        found = []
        for at in range(0, len(data), size):
            page = data[at : at + size]
            digest = hashlib.blake2b(
                digest + page, key=self._key, digest_size=DIGEST_BITS // 8
            ).digest()
            found.append(int.from_bytes(digest, "little"))
        return found

    def _tenant(self, salt: str | None) -> int:
        if salt is None:
            return 0
        if salt not in self._tenants and len(self._tenants) >= MAX_LINES:
            self._tenants.clear()
        return self._tenants.setdefault(salt, len(self._tenants) + 1)

    def _forget(self, now_s: float) -> None:
        lines = self._lines
        while lines and (
            len(lines) > MAX_LINES
            or self._num_pages > MAX_PAGES
            or lines[0].arrival_s < now_s - MAX_AGE_S
        ):
            self._num_pages -= len(lines.popleft().pages)
