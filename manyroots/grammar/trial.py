"""Grammars tried in a process of their own first, so that a crash costs one request.

In: `StructuredOutputsParams`. Out: why they can't be honoured, or None. The library is native code:
a grammar that overflows its stack, hangs or eats memory ends the helper and nothing else.
Without a vocabulary a grammar is checked; with one it is compiled, and its first mask made, exactly
as the engine will do. Verdicts are kept by a digest of the text.

`python -m manyroots.grammar.trial` is the helper.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from manyroots.grammar.library import matchers
from manyroots.grammar.source import grammar_text
from manyroots.grammar.vocabulary import Vocabulary
from manyroots.process.helper_process import HelperDiedError, HelperProcess, Message, answer_calls
from manyroots.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger("manyroots")

CPU_S = 5
"""Of processor time for one grammar. Large real ones take less than one."""
MEMORY_BYTES = 2 << 30
MAX_VERDICTS = 4096
_MAX_REASON_CHARACTERS = 600


class GrammarTrial:
    """Tries grammars, each once. Any thread may ask."""

    def __init__(self, vocabulary: Vocabulary | None = None) -> None:
        greeting = None if vocabulary is None else lambda: _told(vocabulary)
        self._helper = HelperProcess("manyroots.grammar.trial", greeting)
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()

    def fault(self, params: StructuredOutputsParams) -> str | None:
        """Why a grammar can't be honoured; None if it can."""
        told = _encoded(params)
        digest = hashlib.blake2b(told, digest_size=16).digest()
        with self._lock:
            if digest in self._verdicts:
                self._verdicts.move_to_end(digest)
                return self._verdicts[digest]
        verdict = self._try(told)
        with self._lock:
            self._verdicts[digest] = verdict
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict

    def _try(self, told: bytes) -> str | None:
        try:
            [answer] = self._helper.call([b"try", told])
        except HelperDiedError as died:
            logger.warning("a grammar of %d bytes ended its helper process: %s", len(told), died)
            return (
                f"the grammar library can't take it: {died}. Shorten its chains of references and "
                "rules, repeat less, or split it."
            )
        return answer.decode() or None

    def close(self) -> None:
        self._helper.close()


def short(reason: str) -> str:
    """A library's reason, as one line of bounded length."""
    return " ".join(reason.partition("<backtrace>")[0].split())[:_MAX_REASON_CHARACTERS]


def first_fault(matcher: LLMatcher) -> str:
    """Why nothing can be said in a grammar; "" if something can."""
    if not matcher.is_error():
        trial = matcher.deep_copy()
        is_open = any(trial.compute_bitmask())
        if is_open and not trial.is_error():
            return ""
        matcher = trial
    return matcher.get_error().partition("<state>")[0] or "no text follows it."


def _encoded(params: StructuredOutputsParams) -> bytes:
    fields = asdict(params)
    del fields["asked_as"]
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


def _told(vocabulary: Vocabulary) -> Message:
    facts = {"special": sorted(vocabulary.special_ids), "eos": list(vocabulary.eos_ids)}
    pieces = vocabulary.pieces
    sizes = struct.pack(f"<{len(pieces)}I", *map(len, pieces))
    return [b"vocabulary", json.dumps(facts).encode(), sizes, b"".join(pieces)]


class _Helper:
    """The other end."""

    def __init__(self) -> None:
        self._tokenizer: LLTokenizer | None = None

    def answer(self, message: Message) -> Message:
        if message[0] == b"vocabulary":
            self._tokenizer = _vocabulary(*message[1:]).tokenizer()
            return []
        params = StructuredOutputsParams(**json.loads(message[1]))
        return [short(self._fault(params)).encode("utf-8", "replace")]

    def _fault(self, params: StructuredOutputsParams) -> str:
        try:
            text = grammar_text(params)
            if self._tokenizer is not None:
                return first_fault(matchers()(self._tokenizer, text, log_level=0))
            reason = matchers().validate_grammar(text)
            return "" if reason.startswith("WARNING") else reason
        except RecursionError:
            return "it is nested too deeply."
        except Exception as error:  # whatever a caller's text provokes in a parser
            return str(error) or type(error).__name__


def _vocabulary(facts: bytes, sizes: bytes, joined: bytes) -> Vocabulary:
    told, pieces, at = json.loads(facts), [], 0
    for (size,) in struct.iter_unpack("<I", sizes):
        pieces.append(joined[at : at + size])
        at += size
    return Vocabulary(pieces, told["special"], told["eos"], encode=_longest_first(pieces))


def _longest_first(pieces: list[bytes]) -> Callable[[str], list[int]]:
    """Encodes forced text by the longest piece each time. The engine's tokenizer may cut it
    elsewhere; whether anything can be said does not depend on where."""
    ids = {piece: token for token, piece in reversed(list(enumerate(pieces))) if piece}
    longest = min(64, max(map(len, ids), default=0))

    def encode(text: str) -> list[int]:
        data, at, tokens = text.encode("utf-8", "replace"), 0, []
        while at < len(data):
            size = next((n for n in range(longest, 0, -1) if data[at : at + n] in ids), None)
            if size is None:
                break
            tokens.append(ids[data[at : at + size]])
            at += size
        return tokens

    return encode


if __name__ == "__main__":
    answer_calls(_Helper().answer, cpu_s=CPU_S, memory_bytes=MEMORY_BYTES)
