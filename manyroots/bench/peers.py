"""The systems measured beside ours, each run as its own users would run it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from manyroots.bench.processor import Taken, taken
from manyroots.config import ModelSettings
from manyroots.errors import ConfigError
from manyroots.models.decoder import Decoder
from manyroots.models.load import load_model
from manyroots.models.source import ModelSource, resolve_source
from manyroots.models.weights.experts import per_expert


def transformers_model(own: Decoder, source: ModelSource) -> Any:
    """transformers' model with the numbers of ours."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.for_model(**source.config.to_dict())
    with no_init_weights():  # all are copied; drawing random ones takes seconds
        model = AutoModelForCausalLM.from_config(config, dtype=own.dtype)
    model.tie_weights()
    model.to(own.device).eval()
    copy_numbers(model, own)
    return model


def copy_numbers(model: Any, own: Decoder) -> None:
    """Into transformers' model, whatever form ours are kept in."""
    theirs = model.state_dict()
    if own.spec.tie_word_embeddings:
        theirs.pop("lm_head.weight", None)
    ours = own.weights()
    for name, tensor in per_expert(theirs.items()):
        fill = ours[name]
        tensor.copy_(fill.values - fill.offset)


class TransformersPeer:
    """transformers' `generate`, greedy, one padded batch, nothing reused; with adapters, PEFT's
    batch of mixed adapters.

    Its weights are copied from our own model, so that every load format, dummy weights included,
    gives both the same model.
    """

    name = "transformers generate"

    def __init__(
        self, settings: ModelSettings, dtype: str, device: str, adapters: Mapping[str, Path]
    ) -> None:
        source = resolve_source(settings)
        own = load_model(
            source,
            dtype=getattr(torch, dtype),
            device=torch.device(device),
            load_format=settings.load_format,
            seed=settings.seed,
            quantization=settings.quantization,
        )
        self._device = device
        self._model = transformers_model(own, source)
        # Every sequence runs to its full length, as in our own run.
        self._model.generation_config.eos_token_id = None
        self._mixed = self._with_adapters(adapters) if adapters else None

    def _with_adapters(self, adapters: Mapping[str, Path]) -> Any:
        try:
            from peft import PeftModel
        except ImportError as error:
            raise ConfigError(
                "comparing adapters needs the peft package, which is not installed; pip install "
                "peft, or pass --compare none."
            ) from error
        names = list(adapters)
        model = PeftModel.from_pretrained(self._model, adapters[names[0]], adapter_name=names[0])
        for name in names[1:]:
            model.load_adapter(adapters[name], adapter_name=name)
        return model.eval()

    @torch.inference_mode()
    def run(
        self, prompts: list[list[int]], num_new_tokens: int, adapters: list[str] | None
    ) -> tuple[Taken, list[list[int]]]:
        """What it took, and the new tokens of each prompt; `adapters` names one for each prompt."""
        longest = max(len(prompt) for prompt in prompts)
        padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        inputs = torch.tensor(padded, device=self._device)
        attention_mask = torch.tensor(mask, device=self._device)
        model, options = self._model, {}
        if self._mixed is not None:
            # PEFT keeps its layers in the model; "__base__" is its name for none of them.
            model, options = self._mixed, {"adapter_names": adapters or ["__base__"] * len(prompts)}
        with taken() as time:
            output = model.generate(
                input_ids=inputs,
                attention_mask=attention_mask,
                do_sample=False,
                max_new_tokens=num_new_tokens,
                pad_token_id=0,
                **options,
            )
        return time, output[:, longest:].tolist()
