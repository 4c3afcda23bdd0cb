"""manyroots: one base model, any number of LoRA adapters, an exact prefix cache.

`LLM` is imported only when asked for: it brings torch along, and the server's front process and
the decide half must not.

Sets MIMALLOC_PURGE_DELAY, unless it is set: torch's allocator on Arm, which reads it when torch is
imported, else gives what is freed back to the system after 10 ms and fetches it anew, page by page,
when the next layer wants it. That was 6% of a batch's processor time (SmolLM2-135M, Neoverse-N1).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from manyroots.adapter_names import LoRARequest
from manyroots.sampling import SamplingParams
from manyroots.structured_outputs import StructuredOutputsParams
from manyroots.version import __version__

sets_purge_delay = "MIMALLOC_PURGE_DELAY" not in os.environ
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")

if TYPE_CHECKING:
    from manyroots.llm import LLM

__all__ = ["LLM", "LoRARequest", "SamplingParams", "StructuredOutputsParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from manyroots.llm import LLM

        return LLM
    raise AttributeError(f"module 'manyroots' has no attribute {name!r}")
