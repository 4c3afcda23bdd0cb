"""Compiles grammars beside the steps, and holds the requests that wait for them.

In: the numbers of requests whose output has a shape. Out: the same ones once their grammar is
there, or what refuses them. No other request waits meanwhile. A request holds its grammar until it
is over. One that was aborted is still answered; `Preparation` drops the answer.

Only the loop's thread calls this.
"""

from __future__ import annotations

from collections.abc import Iterable

from manyroots.config import ModelSettings
from manyroots.engine.adapter_reads import Finished, Reads
from manyroots.errors import RequestError
from manyroots.grammar.cache import CompiledGrammar, GrammarCache
from manyroots.grammar.vocabulary import Vocabulary
from manyroots.ids import RequestId
from manyroots.messages import ErrorKind, FinishReason, Notice, Output
from manyroots.structured_outputs import StructuredOutputsParams


class GrammarCompiles:
    """The requests that wait for each grammar, and those that hold one."""

    def __init__(self, grammars: GrammarCache) -> None:
        self._grammars = grammars
        self.reads: Reads[CompiledGrammar] = Reads()
        self._waiting: dict[StructuredOutputsParams, list[RequestId]] = {}
        self._held: dict[RequestId, CompiledGrammar] = {}

    def begin(self, wanted: StructuredOutputsParams) -> None:
        """Compile a grammar, unless it is compiled or being compiled."""
        if wanted not in self._waiting and self._grammars.find(wanted) is None:
            self._waiting[wanted] = []
            self.reads.begin(wanted, lambda: self._grammars.compile(wanted))

    def is_there(self, request_id: RequestId, wanted: StructuredOutputsParams) -> bool:
        """Whether a request can continue now; otherwise it is kept until `poll` returns it."""
        grammar = None if wanted in self._waiting else self._grammars.find(wanted)
        if grammar is not None:
            self.hold(request_id, grammar)
            return True
        self.begin(wanted)
        self._waiting[wanted].append(request_id)
        return False

    def hold(self, request_id: RequestId, grammar: CompiledGrammar) -> None:
        """Keep a request's grammar until its last output."""
        self._held[request_id] = grammar

    def poll(self) -> list[tuple[RequestId, CompiledGrammar | Output]]:
        """Requests whose grammar is compiled, and final outputs of those whose grammar failed."""
        outcomes: list[tuple[RequestId, CompiledGrammar | Output]] = []
        for finished in self.reads.take():
            assert isinstance(finished.key, StructuredOutputsParams)
            outcomes += [
                (number, finished.result or _refusal(number, finished))
                for number in self._waiting.pop(finished.key)
            ]
        return outcomes

    def release(self, outputs: Iterable[Output]) -> None:
        """Release grammars of finished requests."""
        if self._held:
            for output in outputs:
                if output.finish_reason is not None:
                    self._held.pop(output.request_id, None)

    def close(self) -> None:
        self.reads.close()
        self._grammars.close()


def _refusal(request_id: RequestId, finished: Finished[CompiledGrammar]) -> Output:
    is_theirs = isinstance(finished.error, RequestError)
    kind = ErrorKind.REQUEST if is_theirs else ErrorKind.ENGINE
    wanted = finished.key
    assert isinstance(wanted, StructuredOutputsParams)
    return Output(
        request_id,
        [],
        FinishReason.ERROR,
        0,
        error=f"{wanted.asked_as}: {finished.error}",
        notice=Notice(error_kind=kind, error_field=wanted.asked_as),
    )


def load_vocabulary(
    settings: ModelSettings, model_path: str, vocab_size: int, eos_ids: tuple[int, ...]
) -> Vocabulary:
    """The engine's own copy of the tokenizer, for the first grammar."""
    # Imported here, because few engines ever compile a grammar.
    from manyroots.text.tokenizer_files import load_tokenizer

    tokenizer = load_tokenizer(settings.tokenizer or model_path, revision=settings.revision)
    ends = tokenizer.ends_with(eos_ids, vocab_size)
    if not ends or not tokenizer.has_bytes:
        what = "has no token that ends a text" if tokenizer.has_bytes else "spells no bytes"
        raise RequestError(
            f"this model's tokenizer {what}, so that its output can't be given a shape.",
            field="structured_outputs",
        )
    return Vocabulary(
        pieces=[tokenizer.token_bytes(token) for token in range(vocab_size)],
        special_ids=frozenset(token for token in tokenizer.special_ids if token < vocab_size),
        eos_ids=ends,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
