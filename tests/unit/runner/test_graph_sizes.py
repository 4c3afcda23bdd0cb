"""Which batch sizes are captured."""

from __future__ import annotations

import pytest

from manyroots.runner.graphs import graph_sizes


@pytest.mark.parametrize("most", [1, 5, 64, 100, 256])
def test_every_batch_has_a_size_that_wastes_less_than_half(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes[-1] == most
    for num_rows in range(1, most + 1):
        size = min(size for size in sizes if size >= num_rows)
        assert num_rows <= size <= max(2 * num_rows - 1, 1)
