"""Other weights in place (G06): the new model's tokens, and nothing that the old one computed."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from manyroots import LLM, SamplingParams
from manyroots.engine import build
from manyroots.errors import UnavailableError
from manyroots.ids import RequestId
from manyroots.messages import Abort, Control, ControlKind, ControlReply, Submit
from manyroots.models import load
from tests.helpers.tiny_adapters import TinyAdapters

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = list(range(3, 40))
NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one config: `one` and `two`; and `cut`, which lacks a tensor."""
    root = tmp_path_factory.mktemp("weights")
    first = TinyAdapters(root / "made").model
    shutil.copytree(first, root / "one")
    shutil.copytree(first, root / "two")
    shutil.copytree(first, root / "cut")
    model: Any = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * weight.std())
    model.save_pretrained(root / "two")
    del model.model.layers[-1].mlp.down_proj
    model.save_pretrained(root / "cut")
    return root


def start(folders: Path, model: str, **more: Any) -> LLM:
    settings = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 64}
    given = settings | {"weights_dirs": [str(folders)]} | more
    return LLM(str(folders / model), **given)


def control(llm: LLM, kind: ControlKind, path: str = "") -> ControlReply:
    llm._loop.handle(Control(next(NUMBERS), kind, path))
    while True:
        llm._loop.step()
        if replies := llm._loop.take_controls():
            return replies[-1]


def take(llm: LLM, path: str) -> ControlReply:
    control(llm, ControlKind.PAUSE)
    reply = control(llm, ControlKind.UPDATE_WEIGHTS, path)
    control(llm, ControlKind.RESUME)
    return reply


def ask(llm: LLM) -> tuple[list[int], int]:
    [result] = llm.generate([PROMPT], GREEDY)
    return result.outputs[0].token_ids, result.num_cached_tokens


@pytest.mark.parametrize("more", [{}, {"num_host_pages": 64}], ids=["device", "host"])
def test_g06_new_weights_find_nothing_of_the_old(folders: Path, more: Any) -> None:
    with start(folders, "two") as llm:
        theirs, _ = ask(llm)
    with start(folders, "one", **more) as llm:
        ours, _ = ask(llm)
        assert ask(llm) == (ours, 36)
        assert ours != theirs
        assert take(llm, "two").error is None
        assert ask(llm) == (theirs, 0)
        assert ask(llm) == (theirs, 36)
        assert take(llm, str(folders / "one")).error is None
        assert ask(llm) == (ours, 0)


def test_g06_pages_have_other_names_with_other_weights(folders: Path, tmp_path: Path) -> None:
    """G06: in storage the old pages lie where the new weights do not look, and the first look
    again when they are back."""
    with start(folders, "one", kv_storage=f"file://{tmp_path}/store") as llm:
        ours, _ = ask(llm)
        cache: Any = llm._loop._scheduler._cache  # type: ignore[attr-defined]
        first = cache._hasher.root
        take(llm, "two")
        assert cache._hasher.root != first
        theirs, num_cached = ask(llm)
        assert num_cached == 0
        assert theirs != ours
        take(llm, "one")
        assert cache._hasher.root == first
        assert ask(llm)[0] == ours


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere", "below one of --weights-dirs"),
        ("../..", "below one of --weights-dirs"),
        ("/", "below one of --weights-dirs"),
        ("", "below one of --weights-dirs"),
        (".", "neither a config.json"),
        ("cut", "missing model.layers"),
    ],
)
def test_g06_weights_that_cannot_be_taken_change_nothing(
    folders: Path, path: str, says: str
) -> None:
    with start(folders, "one") as llm:
        ours = ask(llm)[0]
        error = take(llm, path).error
        assert error is not None
        assert says in error
        assert ask(llm) == (ours, 36)


@pytest.mark.parametrize("moment", ["while it is filled", "before it is named"])
def test_g06_files_that_change_while_they_are_read_end_the_engine(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """G06: a trainer writes the next weights into the same folder. No request may continue with a
    mixture of both, or keep its pages under the name of one of them."""
    folder = tmp_path / "latest"
    shutil.copytree(folders / "two", folder)
    real = load.refill

    def refill(model: Any, source: Any) -> None:
        if moment == "while it is filled":
            (folder / "model.safetensors").write_bytes(b"half")
        real(model, source)
        shutil.copy(folders / "one" / "model.safetensors", folder)

    monkeypatch.setattr(build, "refill", refill)
    weights = [str(folders), str(tmp_path)]
    with start(folders, "one", weights_dirs=weights, kv_storage=f"file://{tmp_path}/kv") as llm:
        ask(llm)
        with pytest.raises(UnavailableError, match="changed while they were read"):
            take(llm, "latest")


def test_g06_weights_are_taken_only_while_nothing_has_begun(folders: Path) -> None:
    with start(folders, "one") as llm:
        reply = control(llm, ControlKind.UPDATE_WEIGHTS, "two")
        assert reply.error is not None
        assert "pause it first" in reply.error


def test_g06_what_was_asked_last_holds(folders: Path) -> None:
    """G06: several may ask before a step ends, and all are told that it is done."""
    with start(folders, "one") as llm:
        for kind in (ControlKind.PAUSE, ControlKind.RESUME, ControlKind.PAUSE):
            llm._loop.handle(Control(next(NUMBERS), kind))
        assert control(llm, ControlKind.UPDATE_WEIGHTS, "two").error is None


def test_g06_r09_a_check_of_the_cache_does_not_hold_up_new_weights(folders: Path) -> None:
    """G06, R09: a caller that pauses does not know of the check and can't wait for it."""
    few = {"max_num_seqs": 4, "max_num_batched_tokens": 8}
    with start(folders, "one", kv_check_share=1.0, **few) as llm:
        ask(llm)
        loop: Any = llm._loop
        loop.handle(Submit(RequestId(99), PROMPT, None, GREEDY, 0, (), None))
        while loop._check._check is None:
            loop.step()
        loop.handle(Abort([RequestId(99)]))
        for _ in range(2):
            loop.step()
        assert loop._scheduler.num_begun
        assert take(llm, "two").error is None
        while loop.has_work:
            assert all(output.request_id > 0 for output in loop.step())
        assert loop._check.total_differences == 0
        ask(llm)
        ask(llm)
        assert loop._check.total_checks, "and the next one is checked"


def test_g05_a_reset_cache_has_nothing(folders: Path) -> None:
    with start(folders, "one") as llm:
        ours, _ = ask(llm)
        assert control(llm, ControlKind.RESET_CACHE).num_pages == 10
        assert ask(llm) == (ours, 0)
