"""Compiled grammars: each made once, found again, and no more of them kept than is wise.

Takes `StructuredOutputsParams`; gives `CompiledGrammar`s. Any thread may ask. What a live request
holds is always found, whatever else comes and goes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from manyroots.errors import RequestError
from manyroots.grammar.bounded_strings import StringFits, StringMasks
from manyroots.grammar.library import matchers
from manyroots.grammar.source import JSON_OPTIONS, grammar_text, text_without_limits
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

    def __init__(
        self,
        matcher: LLMatcher,
        num_characters: int,
        without_limits: tuple[LLMatcher, StringFits] | None,
    ) -> None:
        """`without_limits`: the same with strings of any length, where that helps."""
        self._matcher = matcher
        self._without_limits = without_limits
        self.num_characters = num_characters
        """Of the text that it was compiled from."""

    def start(self) -> LLMatcher:
        """A matcher of its own for one completion."""
        return self._matcher.deep_copy()

    def start_strings(self, num_prompt_tokens: int) -> StringMasks | None:
        """What makes the masks near the end of bounded strings, for one completion."""
        if self._without_limits is None:
            return None
        matcher, fits = self._without_limits
        return StringMasks(matcher.deep_copy(), fits, num_prompt_tokens)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What all grammars of an engine have in common."""

    trial: GrammarTrial
    tokenizer: LLTokenizer
    fits: StringFits | None
    """None for a vocabulary without letters."""


def _compiled(loaded: _Loaded, params: StructuredOutputsParams) -> CompiledGrammar | str:
    """A grammar, or why there is none."""
    try:
        text = grammar_text(params)
        matcher = matchers()(loaded.tokenizer, text, log_level=0)
        reason = first_fault(matcher)
    except ValueError as error:
        reason = str(error)
    if reason:
        return short(reason)
    return CompiledGrammar(matcher, len(text), _without_limits(loaded, params))


def _without_limits(
    loaded: _Loaded, params: StructuredOutputsParams
) -> tuple[LLMatcher, StringFits] | None:
    text = None if loaded.fits is None else text_without_limits(params)
    if text is None or loaded.fits is None:
        return None
    matcher = matchers()(loaded.tokenizer, text, log_level=0)
    return None if matcher.is_error() else (matcher, loaded.fits)


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
        self._loaded: _Loaded | None = None
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
        """One that is there: recently used, or held by a request."""
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
        loaded = self._load()
        made = loaded.trial.fault(params) or _deep(lambda: _compiled(loaded, params))
        if isinstance(made, str):
            raise RequestError(
                f"structured output by {params.kind} can't be honoured: {made}",
                field="structured_outputs",
            )
        with self._lock:
            self._alive[params] = made
            self._keep(params, made)
        return made

    def close(self) -> None:
        """End the process that tries grammars."""
        with self._loading:
            if self._loaded is not None:
                self._loaded.trial.close()

    def _keep(self, params: StructuredOutputsParams, grammar: CompiledGrammar) -> None:
        old = self._recent.pop(params, None)
        self._num_characters += grammar.num_characters - (old.num_characters if old else 0)
        self._recent[params] = grammar
        while self._recent and (
            len(self._recent) > self._max_grammars or self._num_characters > self._max_characters
        ):
            _, dropped = self._recent.popitem(last=False)
            self._num_characters -= dropped.num_characters

    def _load(self) -> _Loaded:
        with self._loading:
            if self._loaded is None:
                vocabulary = self._load_vocabulary()
                tokenizer = vocabulary.tokenizer()
                fits = None
                if {b'"', b"a"} <= set(vocabulary.pieces):
                    fits = StringFits(tokenizer, vocabulary.pieces, JSON_OPTIONS)
                self._loaded = _Loaded(GrammarTrial(vocabulary), tokenizer, fits)
            return self._loaded
