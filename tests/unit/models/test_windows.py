"""Which layers have a window: each family's own rule, taken from what transformers computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from manyroots.config import ModelSettings
from manyroots.errors import ModelError
from manyroots.models.load import describe
from manyroots.models.source import resolve_source
from tests.unit.models.tiny import tiny_config, tiny_spec

WINDOW = 5
LENGTH = 12
FULL, SLIDING = "full_attention", "sliding_attention"
ON: dict[str, Any] = {"sliding_window": WINDOW, "use_sliding_window": True}
OFF: dict[str, Any] = {"sliding_window": WINDOW, "use_sliding_window": False}
UNSAID: dict[str, Any] = {"sliding_window": WINDOW}

CASES: list[tuple[str, dict[str, Any]]] = [
    *[(kind, changes) for kind in ("llama", "mistral", "qwen2", "qwen3", "qwen3-moe")
      for changes in (
          {}, UNSAID, ON, OFF, {"sliding_window": None, "use_sliding_window": True},
          {**ON, "max_window_layers": 0}, {**ON, "max_window_layers": 2},
          {**ON, "max_window_layers": 3}, {**OFF, "max_window_layers": 0},
          {**ON, "layer_types": [FULL] * 3}, {**OFF, "layer_types": [FULL] * 3},
          {**ON, "layer_types": [FULL, SLIDING, FULL]},
          {**ON, "layer_types": [SLIDING] * 3, "max_window_layers": 3},
      )],
    ("mistral", {**OFF, "layer_types": [SLIDING] * 3}),
    ("qwen3-moe", {**OFF, "layer_types": [SLIDING] * 3}),
    ("llama", {**OFF, "layer_types": [SLIDING] * 3}),
    ("gemma3", UNSAID), ("gemma3", {**UNSAID, "layer_types": [FULL] * 4}),
    ("gemma3", {**UNSAID, "layer_types": [FULL, FULL, SLIDING, FULL]}),
    ("gpt-oss", UNSAID), ("gpt-oss", {**UNSAID, "layer_types": [FULL] * 3}),
]  # fmt: skip


def make(folder: Path, kind: str, changes: dict[str, Any]) -> None:
    """A config.json with exactly these fields about windows, and no weights."""
    config = json.loads(tiny_config(kind).to_json_string())
    for name in ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"):
        config.pop(name, None)
    if kind == "mistral" and "sliding_window" not in changes:
        config["sliding_window"] = None  # else it is 4096, which no test is as long as
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@torch.no_grad()
def window_of_transformers(folder: Path) -> int | None:
    """The first position whose logits change when position 0 can't be seen from there."""
    tokens = torch.arange(3, 3 + LENGTH)[None]
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    windowed = theirs(input_ids=tokens, use_cache=False).logits[0]
    if getattr(config, "sliding_window", None) is not None:
        config.sliding_window = 100 * LENGTH
    whole = AutoModelForCausalLM.from_config(config).eval()
    whole.load_state_dict(theirs.state_dict())
    differs = (windowed - whole(input_ids=tokens, use_cache=False).logits[0]).abs().amax(
        dim=1
    ) > 1e-4
    return int(differs.int().argmax()) if differs.any() else None


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_p09_a_family_has_the_window_that_transformers_gives_it(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """P09: Mistral looks at `sliding_window` alone, unless it has types of layers (transformers
    calls it Ministral then); Qwen2, Qwen3, Gemma 3 and gpt-oss look at those; the mixture at its
    switch; Llama at nothing."""
    make(tmp_path, kind, changes)
    wanted = window_of_transformers(tmp_path)
    assert wanted in (None, WINDOW)
    spec = describe(resolve_source(ModelSettings(model=str(tmp_path))))
    found = {layer.attention.memory.window for layer in spec.layers} - {None}
    assert found == (set() if wanted is None else {wanted})


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_p09_layers_with_a_window_that_is_switched_off_are_refused(
    kind: str, tmp_path: Path
) -> None:
    """transformers raises when such a model computes."""
    make(tmp_path, kind, {**OFF, "layer_types": [SLIDING] * 3})
    with pytest.raises(ValueError, match="sliding_window"):
        window_of_transformers(tmp_path)
    with pytest.raises(ModelError, match=r"layer_types.*sliding_attention.*use_sliding_window"):
        describe(resolve_source(ModelSettings(model=str(tmp_path))))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_p09_a_type_of_layer_that_is_not_served_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ModelError, match=r"layer_types.*chunked_attention.*full_attention"):
        tiny_spec(kind, **ON, layer_types=[FULL, "chunked_attention", FULL])
