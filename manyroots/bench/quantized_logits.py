"""`manyroots bench quantization`: how far a model's next-token distributions move when its weights
are rounded, on real text.

The same model twice, once with its weights as they are and once rounded; each distribution of the
first is compared with the second's at the same place. transformers computes both, from our numbers:
what is measured is the weights, and in further runs what a GPU adds to it, which rounds rows, too:
those of prompts to one number of FP8, those of tokens that are decoded to two. As it is served: the
first half of each window is a prompt, the tokens of the second are decoded, and these are compared.
Products with scales inside are tested against the same numbers. Of w4a8 the weights are those of
the file, and what is measured is their product with rows of 8 bits.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import manyroots
from manyroots.bench.machine import describe_machine
from manyroots.bench.peers import copy_numbers, transformers_model
from manyroots.bench.spread import percentile
from manyroots.config import ModelSettings
from manyroots.errors import ConfigError
from manyroots.models.decoder import Decoder
from manyroots.models.load import load_model
from manyroots.models.quantization import FP8, W4A8, as_in_decodes, as_in_prompts, product_of_blocks
from manyroots.models.source import ModelSource, resolve_source
from manyroots.text.tokenizer_files import load_tokenizer

WINDOW = 512
SKIPPED = 8
"""Of a window, its first tokens: what comes next is a guess there."""
ROWS_ROUNDED, AS_SERVED = "with_rows_rounded", "as_served"


def own_text() -> str:
    """Prose that is at hand wherever the package is: what its decide half says of itself."""
    rooms = ("scheduler", "cache", "lora", "simulate")
    pieces = []
    for room in rooms:
        package = import_module(f"{manyroots.__name__}.{room}")
        for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda found: found.name):
            text = inspect.getdoc(import_module(f"{package.__name__}.{module.name}"))
            pieces.append(text or "")
    return "\n\n".join(pieces)


def run_quantization(
    settings: ModelSettings, rounded: ModelSettings, dtype: str, text: str | None, num_tokens: int
) -> dict[str, Any]:
    """Compare; prints a line and gives the report."""
    source = resolve_source(settings)
    tokens = load_tokenizer(settings.tokenizer or str(source.path)).encode(
        own_text() if text is None else text, add_special_tokens=False
    )[:num_tokens]
    if len(tokens) <= SKIPPED + 1:
        raise ConfigError(f"the text has {len(tokens)} tokens; give a longer one with --text.")
    own = _loaded(settings, source, dtype)
    model = transformers_model(own, source)
    exact = _log_probabilities(model, tokens)
    copy_numbers(model, _loaded(rounded, source, dtype))
    if rounded.quantization == W4A8:
        _multiply_as_blocks(model)
    report: dict[str, Any] = {
        "bench": "quantization",
        "model": source.name,
        "dtype": dtype,
        "quantization": rounded.quantization,
        "text": "module docstrings of the package" if text is None else "given",
        "window": WINDOW,
        **compare(_guessed(exact), _guessed(_log_probabilities(model, tokens))),
        **(_of_a_gpu(model, tokens, exact) if rounded.quantization == FP8 else {}),
        "machine": describe_machine(),
    }
    print(
        f"{source.name} {rounded.quantization} against {dtype}: mean KL {report['mean_kl']:.5f} "
        f"(p99 {report['p99_kl']:.4f}) over {report['places']} places, greedy agreement "
        f"{report['greedy_agreement']:.4f}"
    )
    for name in (ROWS_ROUNDED, AS_SERVED):
        if name in report:
            found = report[name]
            print(
                f"{name.replace('_', ' ')}: mean KL {found['mean_kl']:.5f} over {found['places']} "
                f"places, greedy agreement {found['greedy_agreement']:.4f}"
            )
    return report


def _of_a_gpu(model: Any, tokens: list[int], exact: list[Tensor]) -> dict[str, Any]:
    """What rounded rows add: of prompts everywhere, and as tokens are served."""
    with _rows_rounded(model, as_in_prompts):
        as_prompts = compare(_guessed(exact), _guessed(_log_probabilities(model, tokens)))
    with _rows_rounded(model, _as_served):
        as_served = compare(_decoded(exact), _decoded(_log_probabilities(model, tokens)))
    return {ROWS_ROUNDED: as_prompts, AS_SERVED: as_served}


def compare(exact: Tensor, near: Tensor) -> dict[str, Any]:
    """Of log probabilities [places, vocabulary]: the mean of KL(exact || near) in nats, and how
    often both have the same likeliest token."""
    each = (exact.exp() * (exact - near)).sum(-1)
    same = (exact.argmax(-1) == near.argmax(-1)).float().mean()
    return {
        "places": len(each),
        "mean_kl": float(each.mean()),
        "p99_kl": percentile(each.tolist(), 0.99),
        "greedy_agreement": float(same),
    }


def _loaded(settings: ModelSettings, source: ModelSource, dtype: str) -> Decoder:
    return load_model(
        source,
        dtype=getattr(torch, dtype),
        device=torch.device("cpu"),
        load_format=settings.load_format,
        seed=settings.seed,
        quantization=settings.quantization,
    )


def _multiply_as_blocks(model: Any) -> None:
    """By our own products, wherever a weight consists of 4-bit blocks."""
    count = 0
    for module in model.modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        product = product_of_blocks(module.weight.detach(), module.bias)
        if product is not None:
            module.__dict__["forward"] = product
            count += 1
    if not count:
        raise ConfigError("no weight of this file consists of 4-bit blocks; choose fp8.")


def _as_served(x: Tensor) -> Tensor:
    """Activations [1, places, k] of a window: the first half is a prompt."""
    prompt, decoded = x.tensor_split([_decoded_from(x.shape[1])], dim=1)
    return torch.cat((as_in_prompts(prompt), as_in_decodes(decoded)), dim=1)


def _decoded_from(num_places: int) -> int:
    return num_places // 2


@contextmanager
def _rows_rounded(model: Any, rounding: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """What layers multiply with weights is rounded token by token in here, but for the head's."""

    def rounded(module: torch.nn.Linear, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *rest = given
        return rounding(x), *rest

    head = model.get_output_embeddings()
    hooks = [
        module.register_forward_pre_hook(rounded)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def _log_probabilities(model: Any, tokens: list[int]) -> list[Tensor]:
    """Of every place of each window, in float32."""
    found = []
    for begin in range(0, len(tokens), WINDOW):
        window = torch.tensor([tokens[begin : begin + WINDOW]])
        found.append(model(input_ids=window).logits[0].float().log_softmax(-1))
    return found


def _guessed(windows: list[Tensor]) -> Tensor:
    """Every place but each window's first few."""
    return torch.cat([window[SKIPPED:] for window in windows])


def _decoded(windows: list[Tensor]) -> Tensor:
    """Those of tokens that would be decoded."""
    return torch.cat([window[_decoded_from(len(window)) :] for window in windows])
