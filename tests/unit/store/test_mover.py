"""What is on its way beside the steps: begun at once, ended later, refused where it is
unsupported."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from manyroots.ids import AdapterSlot, CopyId, Tier
from manyroots.step import AdapterLoaded, Copy, LoadAdapter, LoadId, SlotRef
from manyroots.store.adapter_loader import AdapterLoader
from manyroots.store.adapter_weights import AdapterWeights
from manyroots.store.mover import Ends, Mover
from tests.helpers.patience import PATIENCE_S
from tests.unit.pools import adapter, make_pool

WEIGHTS = adapter((4, 4, 4), seed=3)


def a_load(load_id: int = 1) -> LoadAdapter:
    target = SlotRef(AdapterSlot(0), 1)
    return LoadAdapter(LoadId(load_id), WEIGHTS.digest, Tier.STORAGE, target, "somewhere", 0)


def a_copy(source: Tier, target: Tier) -> Copy:
    units = np.zeros(1, np.int32)
    return Copy(CopyId(7), 0, source, target, units, units)


def test_a_load_ends_beside_the_steps_and_whoever_waits_is_woken() -> None:
    may_end = threading.Event()

    def read(path: str) -> AdapterWeights:
        assert path == "somewhere"
        assert may_end.wait(PATIENCE_S)
        return WEIGHTS

    pool = make_pool([adapter((0, 0, 0), 0)], is_transposed=True)
    mover = Mover(AdapterLoader(read, pool))
    mover.start([a_load()], [a_copy(Tier.DEVICE, Tier.DEVICE)])
    mover.wait(0.01)
    assert mover.finished() == Ends()
    may_end.set()
    mover.wait(PATIENCE_S)
    assert mover.finished() == Ends(adapters=(AdapterLoaded(LoadId(1), None),))
    assert mover.finished() == Ends()
    mover.wait(PATIENCE_S)  # nothing is under way
    assert pool.weights(0).linears
    mover.close()


@pytest.mark.parametrize(
    ("source", "target"),
    [(Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE), (Tier.STORAGE, Tier.HOST)],
)
def test_a_copy_between_tiers_is_refused_before_anything_begins(source: Tier, target: Tier) -> None:
    def read(path: str) -> AdapterWeights:
        raise AssertionError("a load began")

    mover = Mover(AdapterLoader(read, make_pool([WEIGHTS], is_transposed=True)))
    message = f"copy 7 is from {source.value} to {target.value}"
    with pytest.raises(RuntimeError, match=message):
        mover.start([a_load()], [a_copy(Tier.DEVICE, Tier.DEVICE), a_copy(source, target)])
    mover.wait(PATIENCE_S)
    assert mover.finished() == Ends()
    mover.close()


def test_a_runner_of_the_base_model_alone_has_nothing_to_move() -> None:
    mover = Mover(None)
    mover.start([], [a_copy(Tier.DEVICE, Tier.DEVICE)])
    mover.wait(PATIENCE_S)
    assert mover.finished() == Ends()
    with pytest.raises(RuntimeError, match="made without them"):
        mover.start([a_load()], [])
    mover.close()
