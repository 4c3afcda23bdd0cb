"""manyroots: one base model, any number of LoRA adapters, an exact prefix cache.

What `__all__` names is the public interface. `LLM` and its outputs are imported on first use:
`LLM` imports torch, which the server's front process and the decide half must not do. Importing
this package changes no environment variable.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from manyroots.adapter_names import LoRARequest
from manyroots.errors import (
    AdapterError,
    ConfigError,
    ManyrootsError,
    ModelError,
    NotFoundError,
    OverloadedError,
    RequestError,
    TooLargeError,
    TooLongError,
    UnavailableError,
)
from manyroots.sampling import SamplingParams
from manyroots.structured_outputs import StructuredOutputsParams
from manyroots.version import __version__

if TYPE_CHECKING:
    from manyroots.llm.llm import LLM
    from manyroots.llm.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = [
    "LLM",
    "AdapterError",
    "CompletionOutput",
    "ConfigError",
    "LoRARequest",
    "Logprob",
    "ManyrootsError",
    "ModelError",
    "NotFoundError",
    "OverloadedError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TooLargeError",
    "TooLongError",
    "UnavailableError",
    "__version__",
]

_ON_FIRST_USE = {
    "LLM": "manyroots.llm.llm",
    "CompletionOutput": "manyroots.llm.outputs",
    "Logprob": "manyroots.llm.outputs",
    "RequestOutput": "manyroots.llm.outputs",
}


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return getattr(import_module(_ON_FIRST_USE[name]), name)
    raise AttributeError(f"module 'manyroots' has no attribute {name!r}")
