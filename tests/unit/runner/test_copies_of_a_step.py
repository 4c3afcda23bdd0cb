"""Copies that one plan asks for, within the device and between tiers (H06, T01)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from manyroots.ids import CopyId, StepId, Tier
from manyroots.runner.runner import ModelRunner
from manyroots.step import Copy, Plan
from manyroots.store.host_arena import HostArena
from manyroots.store.tier_copies import TierCopies
from tests.helpers.patience import PATIENCE_S
from tests.helpers.runners import arenas_for
from tests.unit.models.tiny import load_tiny, save_tiny

STATE = 1
NOBODY = np.zeros(0, np.int32)


def units(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


def test_h06_t01_a_state_is_restored_before_a_load_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H06, T01: a request that restores a checkpoint gives its unit up at once, so that a load in
    the same plan may get it. However quick that load is, the state is the one that was saved."""
    save_tiny(tmp_path, "lfm2")
    decoder = load_tiny(tmp_path)
    arenas = arenas_for(decoder, num_pages=4, page_size=4)
    assert decoder.families[STATE].is_state
    host = [HostArena(4, arena.data) for arena in arenas]
    tiers = TierCopies(arenas, host)
    start = tiers.start

    def start_and_wait(copy: Copy) -> None:
        start(copy)
        tiers.wait(PATIENCE_S)

    monkeypatch.setattr(tiers, "start", start_and_wait)
    runner = ModelRunner(
        decoder, arenas, None, tiers, page_size=4, max_num_seqs=2, max_model_len=16
    )
    saved, other = arenas[STATE].data[0].clone().fill_(7), host[STATE].data[1].clone().fill_(9)
    arenas[STATE].data[0], host[STATE].data[1] = saved, other
    restore = Copy(CopyId(1), STATE, Tier.DEVICE, Tier.DEVICE, units(0), units(2))
    load = Copy(CopyId(2), STATE, Tier.HOST, Tier.DEVICE, units(1), units(0))
    plan = Plan(StepId(1), (), (), NOBODY, NOBODY, np.zeros(0, np.bool_), copies=(restore, load))
    result = runner.execute(plan)
    assert [done.copy_id for done in result.copies] == [2]
    assert arenas[STATE].data[2].equal(saved)
    assert arenas[STATE].data[0].equal(other)
    runner.close()
