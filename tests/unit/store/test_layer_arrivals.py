"""Groups of layers: every layer's bytes come before it computes, and none twice."""

from __future__ import annotations

import threading

import pytest

from manyroots.store.layer_arrivals import MOST_GROUPS, LayerArrivals, LayerGroups

PLAIN = (tuple(range(36)),)
MIXED = ((5, 11), (0, 1, 2, 3, 4, 6, 7, 8, 9, 10))
FEW = ((1,), (0, 2))


@pytest.mark.parametrize("layers", [PLAIN, MIXED, FEW], ids=["plain", "mixed", "few"])
def test_t10_groups_cover_every_layers_bytes_once(layers: tuple[tuple[int, ...], ...]) -> None:
    """T10: in a unit of each family, whose layers lie in order."""
    groups, of_layer = LayerGroups(layers), 40
    assert groups.num_groups <= MOST_GROUPS
    for family, own in enumerate(layers):
        unit = bytearray(of_layer * len(own))
        for group in range(groups.num_groups):
            part = groups.part(family, group, len(unit))
            inside = range(len(unit))[part]
            assert all(groups.group_of(own[at // of_layer]) == group for at in inside)
            for at in inside:
                unit[at] += 1
        assert set(unit) == {1}


def test_t10_a_layer_waits_for_its_group_and_those_before() -> None:
    arrivals, passed = LayerArrivals(LayerGroups(PLAIN)), threading.Event()

    def compute() -> None:
        arrivals.before_layer(35)
        passed.set()

    thread = threading.Thread(target=compute)
    thread.start()
    for group in range(5):
        arrivals.tell(group, None)
    assert not passed.wait(0.05)
    arrivals.tell(5, None)
    thread.join()
    assert passed.is_set()


def test_t10_who_waits_for_what_does_not_come_is_told() -> None:
    arrivals = LayerArrivals(LayerGroups(PLAIN))
    arrivals.tell(0, None)
    arrivals.before_layer(0)
    arrivals.fail("OSError: planted")
    with pytest.raises(RuntimeError, match="planted"):
        arrivals.before_layer(6)
