"""Logits equal transformers', however the tokens are cut into steps and pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from manyroots.kernels.tolerances import assert_close
from manyroots.models.decoder import Decoder
from tests.helpers.seeded import Draw
from tests.unit.models.paged import PagedModel
from tests.unit.models.tiny import MODELS, WINDOW, load_tiny, save_tiny

LENGTHS = {"a": 41, "b": 7, "c": 23, "d": 7}
WITH_WINDOWS = [kind for kind in MODELS if kind.endswith("-window")] + ["gemma3", "gpt-oss"]
ALL_CHUNKS = ["llama", "qwen3-moe", "lfm2", "qwen3-next", "qwen3.5", "granite-h", "falcon-h1"]
CHUNKS = (1, 3, 4, 5, 8, 10, 11, 12, 15, 16, 17, 22, 32, 33)
"""Below, at and above pages, windows, chunks of recurrent states, and their multiples."""
SOME_CHUNKS = (5, 16)
"""For models that differ from others in nothing that concerns chunks."""
DECODED = 6
"""Single tokens after the rest of a prompt, for the same models."""


def prompts(lengths: Mapping[str, int] = LENGTHS) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randint(0, 97, (length,), generator=generator).tolist()
        for name, length in lengths.items()
    }


@torch.no_grad()
def expected(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return logits


def in_steps(
    paged: PagedModel, tokens: Mapping[str, list[int]], size: Callable[[str], int]
) -> dict[str, Tensor]:
    """The logits of all tokens, of which `size` says how many of a sequence the next step has.

    Sequences of different lengths run out at different times, so that prefills of several sizes
    and decodes share steps.
    """
    rest = dict(tokens)
    got: dict[str, list[Tensor]] = {name: [] for name in rest}
    while rest:
        now = {name: left[: size(name)] for name, left in rest.items()}
        for name, logits in paged.step(now).items():
            got[name].append(logits)
        rest = {name: left for name, t in rest.items() if (left := t[len(now[name]) :])}
    return {name: torch.cat(parts) for name, parts in got.items()}


def assert_logits(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str) -> None:
    assert got.keys() == wanted.keys()
    for name, logits in got.items():
        try:
            assert_close("logits", logits, wanted[name], torch.float32)
        except AssertionError as error:
            raise AssertionError(f"{what}, sequence {name}: {error}") from error


@pytest.mark.parametrize("kind", MODELS)
def test_prefill_chunks_and_decode_give_transformers_logits(kind: str, tmp_path: Path) -> None:
    """F01: prompts at once and in chunks of many sizes, down to single tokens."""
    theirs = save_tiny(tmp_path, kind)
    ours = load_tiny(tmp_path)
    wanted = {name: expected(theirs, tokens) for name, tokens in prompts().items()}
    assert_logits(PagedModel(ours).step(prompts()), wanted, "at once")
    assert_logits(with_decodes(ours), wanted, "some decoded")
    for chunk in CHUNKS if kind in [*ALL_CHUNKS, *WITH_WINDOWS] else SOME_CHUNKS:
        got = in_steps(PagedModel(ours), prompts(), lambda _, size=chunk: size)
        assert_logits(got, wanted, f"chunks of {chunk}")


def with_decodes(model: Decoder) -> dict[str, Tensor]:
    """The logits of all tokens, of which each sequence's last are computed one by one."""
    paged, tokens = PagedModel(model), prompts()
    first = paged.step({name: ids[:-DECODED] for name, ids in tokens.items()})
    last = in_steps(paged, {name: ids[-DECODED:] for name, ids in tokens.items()}, lambda _: 1)
    return {name: torch.cat((first[name], last[name])) for name in tokens}


@pytest.mark.parametrize("kind", MODELS)
def test_what_the_last_layer_leaves_out_is_what_nobody_reads(kind: str, tmp_path: Path) -> None:
    """F01: where only some tokens' hidden states are wanted, they are those of all tokens."""
    save_tiny(tmp_path, kind)
    whole, last = (PagedModel(load_tiny(tmp_path), only_last=only) for only in (False, True))
    tokens = prompts()
    for begin, end in ((0, 6), (6, 7), (7, 30), (30, 41)):
        now = {name: ids[begin:end] for name, ids in tokens.items() if ids[begin:end]}
        wanted = {name: logits[-1:] for name, logits in whole.step(now).items()}
        assert_logits(last.step(now), wanted, f"tokens {begin} to {end}")


@pytest.mark.parametrize("page_size", [2, 16])
@pytest.mark.parametrize("kind", WITH_WINDOWS)
def test_sequences_of_many_windows_cut_at_random_give_transformers_logits(
    kind: str, page_size: int, tmp_path: Path
) -> None:
    """F01, P09: chunks of all sizes and decodes share steps; pages that windows have left are
    gone."""
    theirs = save_tiny(tmp_path, kind, seed=page_size)
    ours = load_tiny(tmp_path)
    tokens = prompts({"a": 190, "b": 11, "c": 12, "d": 133, "e": 60})
    wanted = {name: expected(theirs, ids) for name, ids in tokens.items()}
    draw = Draw(page_size)
    paged = PagedModel(ours, page_size=page_size, num_pages=300)
    got = in_steps(paged, tokens, lambda _: 1 if draw.flag() else draw.integer(1, 33))
    assert_logits(got, wanted, "cut at random")


@pytest.mark.parametrize("kind", WITH_WINDOWS)
def test_a_window_changes_logits_behind_it_and_none_within_it(kind: str, tmp_path: Path) -> None:
    """So that the tests above would notice one that is not there."""
    theirs = save_tiny(tmp_path, kind)
    [tokens] = prompts({"a": 41}).values()
    windowed = expected(theirs, tokens)
    theirs.config.sliding_window = 1000
    whole = expected(theirs, tokens)
    differs = (windowed - whole).abs().amax(dim=1) > 1e-2
    assert not differs[:WINDOW].any()
    assert differs[WINDOW:].float().mean() > 0.9


def test_decodes_and_prefills_mixed_in_one_step_do_not_disturb_each_other(tmp_path: Path) -> None:
    theirs = save_tiny(tmp_path)
    paged = PagedModel(load_tiny(tmp_path), page_size=8)
    tokens = prompts()
    wanted = {name: expected(theirs, ids) for name, ids in tokens.items()}
    paged.step({"b": tokens["b"][:6], "a": tokens["a"][:30]})
    mixed = paged.step({"b": tokens["b"][6:], "c": tokens["c"], "a": tokens["a"][30:31]})
    assert_close("logits", mixed["b"], wanted["b"][6:], torch.float32)
    assert_close("logits", mixed["c"], wanted["c"], torch.float32)
    assert_close("logits", mixed["a"], wanted["a"][30:31], torch.float32)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "qwen3-moe"])
def test_bfloat16_stays_near_float32(kind: str, tmp_path: Path) -> None:
    theirs = save_tiny(tmp_path, kind, initializer_range=0.05)
    paged = PagedModel(load_tiny(tmp_path, torch.bfloat16), page_size=16)
    tokens = prompts()["a"]
    prefill = paged.step({"a": tokens[:37]})["a"]
    decoded = [paged.step({"a": [token]})["a"] for token in tokens[37:]]
    wanted = expected(theirs, tokens)
    assert_close("logits", torch.cat([prefill, *decoded]), wanted, torch.bfloat16)
