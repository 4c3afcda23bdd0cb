"""Arrays travel in one buffer and arrive as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from manyroots.runner.packet import PacketLayout, send


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
