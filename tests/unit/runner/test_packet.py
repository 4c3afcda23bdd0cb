"""Arrays travel in one buffer and arrive as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from manyroots.runner.packet import KeptArrays, PacketLayout, send


def test_arrays_of_any_type_and_size_arrive_whole() -> None:
    arrays = {
        "odd": np.arange(3, dtype=np.int32),
        "none": np.empty((0, 2), np.int32),
        "table": np.arange(10, dtype=np.int64).reshape(5, 2),
        "heat": np.array([0.5], np.float32),
    }
    arrived = send(arrays, torch.device("cpu"))
    for name, array in arrays.items():
        np.testing.assert_array_equal(arrived[name].numpy(), array)
        assert arrived[name].dtype == torch.from_numpy(array).dtype


def test_an_array_of_another_size_than_the_layouts_is_refused() -> None:
    layout = PacketLayout({"rows": np.zeros(4, np.int64)})
    with pytest.raises(ValueError, match="broadcast"):
        layout.pack({"rows": np.zeros(5, np.int64)}, pin=False)


def test_kept_arrays_are_sent_with_the_values_they_have_by_then() -> None:
    """From the same buffer each time; arrays that they were made of stay as they were."""
    first = {"rows": np.arange(4), "heat": np.full((2, 3), 0.5, np.float32)}
    layout, kept = PacketLayout(first), KeptArrays(first)
    buffer = kept.pack(layout, pin=False)
    views = layout.views(buffer)
    assert views["rows"].tolist() == [0, 1, 2, 3]
    kept["rows"][1:] += 5
    kept["heat"][...] = 2.0
    assert kept.pack(layout, pin=False) is buffer
    assert views["rows"].tolist() == [0, 6, 7, 8]
    assert views["heat"].tolist() == [[2.0] * 3] * 2
    assert first["rows"].tolist() == [0, 1, 2, 3]
