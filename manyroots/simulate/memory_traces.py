"""Made traces in which pages and adapters compete for memory, each in another way.

As in `synthetic.py`, the same seed and number of lines give the same trace. Sizes suit a memory of
3 GiB on the preset of an H200: some 35 adapters fit, or 1,300 pages.
"""

from __future__ import annotations

import random

from manyroots.simulate.trace import EndsBy, TraceRequest, TraceSegment

NUM_PHASES = 6
"""Of `shifting`."""


def hot_documents(rng: random.Random, num_requests: int) -> list[TraceRequest]:
    """24 documents with many questions each, and four adapters: pages are worth most."""
    return _about_documents(rng, num_requests, 0.0)


def many_adapters(rng: random.Random, num_requests: int) -> list[TraceRequest]:
    """60 adapters with short prompts, of which none comes twice: pages are worth nothing."""
    return _of_many_adapters(rng, num_requests, 0.0)


def adapter_talks(rng: random.Random, num_requests: int) -> list[TraceRequest]:
    """24 adapters with a system prompt each; conversations of 1-6 turns need both."""
    popularity, lines, start_s, talk = _zipf(24, 0.8), list[TraceRequest](), 0.0, 0
    while len(lines) < num_requests:
        start_s += rng.expovariate(10.0)
        talk += 1
        [adapter] = rng.choices(range(24), popularity)
        said, arrival_s = [TraceSegment(f"system-{adapter}", 400)], start_s
        for turn in range(rng.randint(1, 6)):
            said.append(TraceSegment(f"talk-{talk}/question-{turn}", 150))
            lines.append(_line(arrival_s, said, f"adapter-{adapter}", 40))
            said.append(TraceSegment(f"talk-{talk}/answer-{turn}", 40))
            arrival_s += 0.8 + rng.expovariate(1.0)
    return lines


def adapter_scans(rng: random.Random, num_requests: int) -> list[TraceRequest]:
    """40 adapters with prompts that come once, and between them six hot prompts of one adapter:
    most pages are worth nothing, however young they are."""
    popularity, lines, arrival_s = _zipf(40, 0.8), list[TraceRequest](), 0.0
    for number in range(num_requests):
        arrival_s += rng.expovariate(20.0)
        [adapter] = rng.choices(range(40), popularity)
        question = TraceSegment(f"prompt-{number}", rng.randint(500, 2500))
        if number % 4:
            lines.append(_line(arrival_s, [question], f"adapter-{adapter}", 16))
        else:
            hot = TraceSegment(f"hot-{rng.randrange(6)}", 2000)
            asked = TraceSegment(f"question-{number}", 50)
            lines.append(_line(arrival_s, [hot, asked], "hot", 16))
    return lines


def shifting(rng: random.Random, num_requests: int) -> list[TraceRequest]:
    """`hot_documents` and `many_adapters` in turn, in six phases: no fixed split suits both."""
    lines: list[TraceRequest] = []
    for phase in range(NUM_PHASES):
        start_s = lines[-1].arrival_s + 0.2 if lines else 0.0
        count = num_requests // NUM_PHASES + (phase < num_requests % NUM_PHASES)
        part = _of_many_adapters if phase % 2 else _about_documents
        lines += part(rng, count, start_s)
    return lines


def _about_documents(rng: random.Random, count: int, start_s: float) -> list[TraceRequest]:
    popularity, lines, arrival_s = _zipf(24, 0.6), list[TraceRequest](), start_s
    for number in range(count):
        arrival_s += rng.expovariate(25.0)
        [document] = rng.choices(range(24), popularity)
        asked = TraceSegment(f"question-{start_s}-{number}", 60)
        prompt = [TraceSegment(f"document-{document}", 2000), asked]
        lines.append(_line(arrival_s, prompt, f"reader-{document % 4}", 16))
    return lines


def _of_many_adapters(rng: random.Random, count: int, start_s: float) -> list[TraceRequest]:
    popularity, lines, arrival_s = _zipf(60, 0.6), list[TraceRequest](), start_s
    for number in range(count):
        arrival_s += rng.expovariate(60.0)
        [adapter] = rng.choices(range(60), popularity)
        prompt = [TraceSegment(f"prompt-{start_s}-{number}", 120)]
        lines.append(_line(arrival_s, prompt, f"adapter-{adapter}", 32))
    return lines


def _zipf(count: int, exponent: float) -> list[float]:
    return [1 / (rank + 1) ** exponent for rank in range(count)]


def _line(
    arrival_s: float, prompt: list[TraceSegment], adapter: str, num_output_tokens: int
) -> TraceRequest:
    return TraceRequest(
        arrival_s=round(arrival_s, 6),
        prompt=tuple(prompt),
        adapter=adapter,
        salt=None,
        output_tokens=num_output_tokens,
        ends_by=EndsBy.STOP,
    )


MEMORY_TRACES = (hot_documents, many_adapters, adapter_talks, adapter_scans, shifting)
