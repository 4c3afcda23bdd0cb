"""Where `llguidance` comes in: when a shape is first asked for.

Few requests ask for one, and an engine whose machine lacks the package serves all the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from manyroots.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher


def matchers(field: str = "structured_outputs") -> type[LLMatcher]:
    """What follows grammars. Raises RequestError where it is not installed; `field` is what the
    caller called what it asked for."""
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise RequestError(
            f"{field} needs the package llguidance, which is not installed where this "
            "server runs (pip install llguidance).",
            field=field,
        ) from error
    return LLMatcher
