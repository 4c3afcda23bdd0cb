"""Draws depend on (seed, index) alone and are uniform."""

from __future__ import annotations

import numpy as np

from manyroots.kernels.sampling.exact import uniform


def test_draws_do_not_depend_on_their_neighbours() -> None:
    seeds = np.array([1, 2, 2**64 - 1], np.uint64)
    indices = np.array([0, 5, 9], np.int64)
    together = uniform(seeds, indices)
    alone = [uniform(seeds[i : i + 1], indices[i : i + 1])[0] for i in range(3)]
    assert together.tolist() == alone


def test_draws_are_uniform_over_indices_and_over_seeds() -> None:
    count = 20_000
    zeros = np.zeros(count)
    for draws in (
        uniform(zeros.astype(np.uint64), np.arange(count)),
        uniform(np.arange(count).astype(np.uint64), zeros.astype(np.int64)),
    ):
        assert (draws >= 0).all()
        assert (draws < 1).all()
        histogram = np.histogram(draws, bins=20, range=(0, 1))[0]
        # Each bin holds 1000 +- 31; five standard deviations never fail by chance.
        assert abs(histogram - count / 20).max() < 5 * 31
        assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 0.05
