"""Reused buffers."""

from __future__ import annotations

import threading

import torch

from manyroots.kernels.scratch import scratch

CPU = torch.device("cpu")


def test_the_same_name_gives_the_same_memory_until_it_must_grow() -> None:
    small = scratch("test", (2, 3), torch.float32, CPU)
    again = scratch("test", (4,), torch.float32, CPU)
    assert small.data_ptr() == again.data_ptr()
    assert scratch("test", (100, 10), torch.float32, CPU).shape == (100, 10)


def test_threads_do_not_share_buffers() -> None:
    mine = scratch("test", (8,), torch.float32, CPU).data_ptr()
    theirs: list[int] = []
    thread = threading.Thread(
        target=lambda: theirs.append(scratch("test", (8,), torch.float32, CPU).data_ptr())
    )
    thread.start()
    thread.join()
    assert theirs != [mine]


def test_a_buffer_made_in_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        scratch("made in inference", (8,), torch.float32, CPU)
    scratch("made in inference", (8,), torch.float32, CPU).fill_(1.0)
