"""Compiled grammars: each made once, found again, and no more of them kept than is wise.

Takes `StructuredOutputsParams`; gives `CompiledGrammar`s. Any thread may ask. What a live request
holds is always found, whatever else comes and goes.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLTokenizer

from manyroots.errors import RequestError
from manyroots.grammar.source import grammar_text
from manyroots.grammar.vocabulary import Vocabulary
from manyroots.structured_outputs import StructuredOutputsParams

MAX_GRAMMARS = 256
MAX_LEXERS = 8
"""Of one grammar: as many of its masks can be made side by side."""
ASKED_PER_LEXER = 4
"""Requests for one grammar that are worth a further lexer: most grammars are asked for once."""


class CompiledGrammar:
    """A grammar for one vocabulary, at its beginning.

    All copies of one matcher share its lexer, which learns as it goes and which one thread at a
    time may use. So a grammar that is asked for often is compiled several times, and rows take
    the lexers in turn.
    """

    def __init__(self, make: Callable[[], LLMatcher], first: LLMatcher, num_tokens: int) -> None:
        self._make = make
        self._matchers = [first]
        self._max_lexers = min(MAX_LEXERS, os.cpu_count() or 1)
        self._num_asked = 0
        self._num_lexers = 1
        """Those that there are, and those that are being made."""
        self._num_started = 0
        self.num_tokens = num_tokens
        """Of the vocabulary."""

    def start(self) -> tuple[LLMatcher, int]:
        """A matcher of its own for one completion, and which lexer it shares with others."""
        number = self._num_started % len(self._matchers)
        self._num_started += 1
        return self._matchers[number].deep_copy(), number

    def ask(self) -> int:
        """One more request is about to use it: how many lexers should be added for that."""
        self._num_asked += 1
        wanted = min(self._max_lexers, self._num_asked // ASKED_PER_LEXER)
        num_more = max(0, wanted - self._num_lexers)
        self._num_lexers += num_more
        return num_more

    def add_lexer(self) -> CompiledGrammar:
        """Takes as long as compiling did; for a thread beside the steps."""
        matcher = self._make()
        if not matcher.is_error():
            self._matchers.append(matcher)
        return self


def _fault(matcher: LLMatcher) -> str:
    """Why nothing can be said in a grammar; "" if something can."""
    if not matcher.is_error():
        trial = matcher.deep_copy()
        is_open = any(trial.compute_bitmask())
        if is_open and not trial.is_error():
            return ""
        matcher = trial
    return matcher.get_error().partition("<state>")[0] or "no text follows it."


class GrammarCache:
    """All grammars of one engine."""

    def __init__(
        self, load_vocabulary: Callable[[], Vocabulary], *, max_grammars: int = MAX_GRAMMARS
    ) -> None:
        """`load_vocabulary` is called when the first grammar is compiled, on its thread."""
        self._load_vocabulary = load_vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._max_grammars = max_grammars
        self._recent: OrderedDict[StructuredOutputsParams, CompiledGrammar] = OrderedDict()
        self._alive: WeakValueDictionary[StructuredOutputsParams, CompiledGrammar] = (
            WeakValueDictionary()
        )

    def find(self, params: StructuredOutputsParams) -> CompiledGrammar | None:
        """One that is there: lately used, or held by somebody."""
        with self._lock:
            grammar = self._alive.get(params)
            if grammar is not None:
                self._keep(params, grammar)
            return grammar

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """One that is there, or made now. Raises RequestError with the reason if it can't be."""
        if grammar := self.find(params):
            return grammar
        tokenizer = self._load()
        try:
            make = partial(LLMatcher, tokenizer, grammar_text(params), log_level=0)
            matcher = make()
            reason = _fault(matcher)
        except ValueError as error:
            reason = str(error)
        if reason:
            raise RequestError(
                f"structured output by {params.kind} can't be honoured: "
                f"{' '.join(reason.split())[:600]}",
                field="structured_outputs",
            )
        grammar = CompiledGrammar(make, matcher, tokenizer.vocab_size)
        with self._lock:
            self._alive[params] = grammar
            self._keep(params, grammar)
        return grammar

    def _keep(self, params: StructuredOutputsParams, grammar: CompiledGrammar) -> None:
        self._recent[params] = grammar
        self._recent.move_to_end(params)
        while len(self._recent) > self._max_grammars:
            self._recent.popitem(last=False)

    def _load(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load_vocabulary().tokenizer()
            return self._tokenizer
