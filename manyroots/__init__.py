"""manyroots: one base model, any number of LoRA adapters, an exact prefix cache.

`LLM` is imported only when asked for: it brings torch along, and the server's front process and
the decide half must not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manyroots.adapter_names import LoRARequest
from manyroots.sampling import SamplingParams
from manyroots.structured_outputs import StructuredOutputsParams
from manyroots.version import __version__

if TYPE_CHECKING:
    from manyroots.llm import LLM

__all__ = ["LLM", "LoRARequest", "SamplingParams", "StructuredOutputsParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from manyroots.llm import LLM

        return LLM
    raise AttributeError(f"module 'manyroots' has no attribute {name!r}")
