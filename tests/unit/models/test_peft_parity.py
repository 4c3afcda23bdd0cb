"""Logits with adapters equal PEFT's, alone and mixed, however the tokens are cut into steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from manyroots.kernels.tolerances import assert_close
from manyroots.scheduler.request import invoked_at
from tests.unit.models.paged import PagedModel
from tests.unit.models.peft_models import ADAPTERS, ATTENTION, EVERYTHING, MLP, Pair, make_pair

KINDS = [
    "llama", "llama-tied", "qwen2", "qwen3", "mistral", "mistral-window", "qwen2-window", "gemma3",
]  # fmt: skip
"""Prompts are up to two and a half windows long."""


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 97, (length,), generator=generator).tolist()


def run(pair: Pair, requests: dict[str, tuple[str | None, list[int]]], chunk: int | None) -> None:
    """Compute all requests together, `chunk` tokens of each per step, and compare with PEFT."""
    paged = PagedModel(pair.ours, pair.pool)
    got: dict[str, list[Tensor]] = {name: [] for name in requests}
    rest = {name: tokens for name, (_, tokens) in requests.items()}
    paged.slot_of = {
        name: pair.slot_of[adapter] for name, (adapter, _) in requests.items() if adapter
    }
    while rest:
        now = {name: tokens[:chunk] for name, tokens in rest.items()}
        for name, logits in paged.step(now).items():
            got[name].append(logits)
        rest = {name: left for name, tokens in rest.items() if (left := tokens[len(now[name]) :])}
    for name, (adapter, tokens) in requests.items():
        wanted = pair.expected(adapter, tokens)
        assert_close("logits", torch.cat(got[name]), wanted, torch.float32)


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), request.param, ADAPTERS)


@pytest.mark.parametrize("pair", KINDS, indirect=True)
def test_each_adapter_alone_gives_pefts_logits_w13_w14(pair: Pair) -> None:
    """W13, W14: rank-stabilised scaling, patterns, per-module ranks; every module."""
    base = pair.expected(None, prompt(1, 19))
    for name in ADAPTERS:
        run(pair, {"a": (name, prompt(1, 19))}, chunk=None)
        assert (pair.expected(name, prompt(1, 19)) - base).abs().max() > 0.1, "it changes something"


@pytest.mark.parametrize("pair", KINDS, indirect=True)
@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_eight_adapters_and_the_base_in_one_batch_give_pefts_logits_w17(
    pair: Pair, chunk: int | None
) -> None:
    """W17: mixed ranks, scalings, base and adapter rows in one batch equal running each alone."""
    requests: dict[str, tuple[str | None, list[int]]] = {
        "base": (None, prompt(50, 9)), "base too": (None, prompt(51, 17))
    }  # fmt: skip
    for index, name in enumerate(ADAPTERS):
        requests[name] = (name, prompt(index, 5 + 3 * index))
        if index % 2:
            requests[f"{name}, again"] = (name, prompt(20 + index, 12))
    run(pair, requests, chunk)


@pytest.mark.parametrize("kind", ["gpt-oss", "qwen3-moe-window"])
def test_all_linear_adapters_of_experts_with_windows_give_pefts_logits_w14(
    kind: str, tmp_path: Path
) -> None:
    """W14: what PEFT calls all-linear, which is experts and router, too; embedding and head."""
    adapters = {
        "all linear": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
        "ends": ADAPTERS["embedding and head"],
        "both": {
            "r": 3,
            "lora_alpha": 4,
            "target_modules": [*ATTENTION, "embed_tokens", "lm_head"],
        },
    }
    # With gate and up together as wide as the model, PEFT's flat format would have two readings.
    sizes = {"moe_intermediate_size": 20} if kind == "qwen3-moe-window" else {}
    pair = make_pair(tmp_path, kind, adapters, **sizes)
    requests: dict[str, tuple[str | None, list[int]]] = {"base": (None, prompt(50, 29))}
    for index, name in enumerate(adapters):
        requests[name] = (name, prompt(index, 17 + 9 * index))
        moved = pair.expected(name, prompt(1, 19)) - pair.expected(None, prompt(1, 19))
        assert moved.abs().max() > 0.1, "it changes something"
    for chunk in (None, 1, 7):
        run(pair, requests, chunk)


@pytest.mark.parametrize("kind", ["lfm2", "lfm2-biased"])
def test_f08_adapters_of_recurrent_mixers_give_pefts_logits(kind: str, tmp_path: Path) -> None:
    """F08: every product of them and of their feed-forward blocks, by the names of public
    adapters."""
    adapters = {
        "all linear": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
        "mixers": {"r": 3, "lora_alpha": 4, "target_modules": ["in_proj", "out_proj", "q_proj"]},
        "block": {"r": 5, "lora_alpha": 8, "target_modules": ["w1", "w2", "w3", "embed_tokens"]},
    }
    pair = make_pair(tmp_path, kind, adapters)
    requests: dict[str, tuple[str | None, list[int]]] = {"base": (None, prompt(50, 29))}
    for index, name in enumerate(adapters):
        requests[name] = (name, prompt(index, 17 + 9 * index))
        moved = pair.expected(name, prompt(1, 19)) - pair.expected(None, prompt(1, 19))
        assert moved.abs().max() > 0.1, "it changes something"
    for chunk in (None, 1, 7):
        run(pair, requests, chunk)


ACTIVATED = {
    "llama": ATTENTION + MLP,
    # All but what is computed again for tokens before the invocation.
    "deepseek-v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
}


@pytest.mark.parametrize("kind", ACTIVATED)
@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_an_alora_acts_from_its_invocation_on_as_in_peft_n22(
    chunk: int | None, kind: str, tmp_path: Path
) -> None:
    """N22: before its invocation tokens an activated adapter is the base model."""
    invocation = [7, 8]
    options = {"r": 8, "lora_alpha": 32, "target_modules": ACTIVATED[kind]}
    pair = make_pair(
        tmp_path, kind, {"activated": {**options, "alora_invocation_tokens": invocation}}
    )
    start = [token for token in prompt(3, 20) if token not in invocation]
    requests = {
        "invoked": [*start, *invocation, 1, 2, 3],
        "invoked twice": [*invocation, *start, *invocation, 5],
        "at once": [*invocation, 4, 4],
        "never": start,
    }
    paged = PagedModel(pair.ours, pair.pool)
    paged.slot_of = dict.fromkeys(requests, 0)
    paged.adapter_from = {
        name: invoked_at(tokens, tuple(invocation)) for name, tokens in requests.items()
    }
    got: dict[str, list[Tensor]] = {name: [] for name in requests}
    rest = dict(requests)
    while rest:
        for name, logits in paged.step({n: t[:chunk] for n, t in rest.items()}).items():
            got[name].append(logits)
        rest = {n: left for n, t in rest.items() if chunk is not None and (left := t[chunk:])}
    for name, tokens in requests.items():
        wanted = pair.expected("activated", tokens)
        assert_close("logits", torch.cat(got[name]), wanted, torch.float32)
    base = pair.expected(None, requests["invoked"])
    changed = (torch.cat(got["invoked"]) - base).abs().amax(dim=1) > 1e-2
    assert changed.tolist() == [False] * len(start) + [True] * 5


def test_targets_are_those_of_peft(tmp_path: Path) -> None:
    options = {"r": 2, "target_modules": EVERYTHING}
    pair = make_pair(tmp_path, "llama", {"everything": options})
    targets = pair.ours.adapter_targets()
    modules = dict(pair.theirs.base_model.model.named_modules())
    for name, target in targets.items():
        weight = modules[name].base_layer.weight
        is_lookup = name == "model.embed_tokens"
        expected = weight.shape if is_lookup else weight.shape[::-1]
        assert (target.in_features, target.out_features) == tuple(expected)
    assert len(targets) == 3 * 7 + 2
