"""Compiled grammars: each made once, found again, and no more of them kept than is wise.

Takes `StructuredOutputsParams`; gives `CompiledGrammar`s. Any thread may ask. What a live request
holds is always found, whatever else comes and goes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from manyroots.errors import RequestError
from manyroots.grammar.library import matchers
from manyroots.grammar.source import grammar_text
from manyroots.grammar.trial import GrammarTrial, first_fault, short
from manyroots.grammar.vocabulary import Vocabulary
from manyroots.process.helper_process import STACK_BYTES
from manyroots.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

MAX_GRAMMARS = 256
MAX_CHARACTERS = 2 << 20
"""Of all texts together: compiled, each takes 30 to 130 bytes."""
_STACKS = threading.Lock()
"""The size of new stacks is one setting for all threads."""


class CompiledGrammar:
    """A grammar for one vocabulary, at its beginning."""

    def __init__(self, matcher: LLMatcher, num_tokens: int, num_characters: int) -> None:
        self._matcher = matcher
        self.num_tokens = num_tokens
        """Of the vocabulary."""
        self.num_characters = num_characters
        """Of the text that it was compiled from."""

    def start(self) -> LLMatcher:
        """A matcher of its own for one completion."""
        return self._matcher.deep_copy()


def _compiled(tokenizer: LLTokenizer, params: StructuredOutputsParams) -> CompiledGrammar | str:
    """A grammar, or why there is none."""
    try:
        text = grammar_text(params)
        matcher = matchers()(tokenizer, text, log_level=0)
        reason = first_fault(matcher)
    except ValueError as error:
        reason = str(error)
    return short(reason) if reason else CompiledGrammar(matcher, tokenizer.vocab_size, len(text))


def _deep(job: Callable[[], T]) -> T:
    """What a job gives on a stack far deeper than the trial's, which it has passed."""
    results: Future[T] = Future()

    def run() -> None:
        try:
            results.set_result(job())
        except BaseException as error:
            results.set_exception(error)

    with _STACKS:
        usual = threading.stack_size(4 * STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar")
            thread.start()
        finally:
            threading.stack_size(usual)
    return results.result()


class GrammarCache:
    """All grammars of one engine."""

    def __init__(
        self,
        load_vocabulary: Callable[[], Vocabulary],
        *,
        max_grammars: int = MAX_GRAMMARS,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        """`load_vocabulary` is called when the first grammar is compiled, on its thread."""
        self._load_vocabulary = load_vocabulary
        self._loaded: tuple[GrammarTrial, LLTokenizer] | None = None
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._max_grammars, self._max_characters = max_grammars, max_characters
        self._num_characters = 0
        """Of those that are kept."""
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
        matchers()
        trial, tokenizer = self._load()
        made = trial.fault(params) or _deep(lambda: _compiled(tokenizer, params))
        if isinstance(made, str):
            raise RequestError(
                f"structured output by {params.kind} can't be honoured: {made}",
                field="structured_outputs",
            )
        with self._lock:
            self._alive[params] = made
            self._keep(params, made)
        return made

    def _keep(self, params: StructuredOutputsParams, grammar: CompiledGrammar) -> None:
        old = self._recent.pop(params, None)
        self._num_characters += grammar.num_characters - (old.num_characters if old else 0)
        self._recent[params] = grammar
        while self._recent and (
            len(self._recent) > self._max_grammars or self._num_characters > self._max_characters
        ):
            _, dropped = self._recent.popitem(last=False)
            self._num_characters -= dropped.num_characters

    def _load(self) -> tuple[GrammarTrial, LLTokenizer]:
        with self._loading:
            if self._loaded is None:
                vocabulary = self._load_vocabulary()
                self._loaded = GrammarTrial(vocabulary), vocabulary.tokenizer()
            return self._loaded
