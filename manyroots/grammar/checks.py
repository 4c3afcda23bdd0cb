"""Whether a shape can be honoured, asked before the engine is.

Takes `StructuredOutputsParams`; raises RequestError with the reason. One helper process does it for
all of this process (`trial.py`), without a vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from manyroots.errors import RequestError
from manyroots.grammar.library import matchers
from manyroots.grammar.trial import GrammarTrial
from manyroots.structured_outputs import StructuredOutputsParams


def check_structure(params: StructuredOutputsParams, field: str = "structured_outputs") -> None:
    """Raise RequestError if this can't be honoured. `field` is what the caller called it. May take
    seconds, for a large schema: never on the event loop."""
    matchers(field)
    fault = _trial().fault(replace(params, prefix=None, instead=None))
    if fault is not None:
        raise RequestError(f"{field} can't be honoured: {fault}", field=field)


@cache
def _trial() -> GrammarTrial:
    return GrammarTrial()
