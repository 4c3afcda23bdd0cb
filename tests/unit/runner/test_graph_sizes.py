"""Which steps are captured, and when."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from manyroots.runner.first_runs import FirstRuns
from manyroots.runner.graphs import GraphKey, Graphs, graph_sizes
from manyroots.runner.step_arrays import NamedArrays
from manyroots.step import FirstRun


@pytest.mark.parametrize("most", [1, 5, 64, 100, 256])
def test_every_batch_has_a_size_that_wastes_less_than_half(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes[-1] == most
    for num_rows in range(1, most + 1):
        size = min(size for size in sizes if size >= num_rows)
        assert num_rows <= size <= max(2 * num_rows - 1, 1)


def test_a_kind_that_was_not_captured_at_start_is_when_it_is_needed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first such step is launched kernel by kernel: no request waits for a graph that may never
    be used again."""
    launched: list[GraphKey] = []
    captured: list[GraphKey] = []
    replayed: list[int] = []

    class Layout:
        def pack(self, arrays: NamedArrays, *, pin: bool) -> torch.Tensor:
            return torch.from_numpy(arrays["tokens"])

    class Graph:
        def replay(self) -> None:
            replayed.append(1)

    class Captured:
        graphs, layout, inputs, sampled = (Graph(),), Layout(), torch.zeros(8).int(), "a graph's"

    def capture(key: GraphKey) -> Captured:
        captured.append(key)
        return Captured()

    first_runs = FirstRuns()
    graphs = Graphs(
        lambda views, key: launched.append(key), lambda logits, views: "launched",
        lambda key: {}, max_num_rows=8, has_adapters=False, device=torch.device("cpu"),
        capture=False, first_runs=first_runs,
    )  # fmt: skip
    monkeypatch.setattr(graphs, "_captures", True)
    monkeypatch.setattr(graphs, "_capture", capture)
    graphs.capture_all([])
    first_runs.begin()
    at_start = list(captured)
    assert [key.size for key in at_start] == [8, 4, 2, 1]
    arrays = {"tokens": np.zeros(8, np.int32)}
    rare = {**arrays, "shared_lens": np.zeros(8, np.int32)}
    assert graphs.run(arrays) == "a graph's"
    assert graphs.run(rare) == "launched"
    assert captured == at_start
    assert graphs.run(rare) == graphs.run(rare) == "a graph's"
    assert captured == [*at_start, GraphKey(8, with_adapters=False, shares=True)]
    assert first_runs.take() == (FirstRun("graph", str(captured[-1])),)
    assert graphs.used == {GraphKey(8, with_adapters=False): 1, captured[-1]: 3}
    assert len(launched) == 1
    assert len(replayed) == 3


def test_steps_that_check_guesses_are_captured_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(
        lambda views, key: torch.empty(0), lambda logits, views: None, lambda key: {},
        max_num_rows=4, has_adapters=False, device=torch.device("cpu"), capture=False,
        first_runs=FirstRuns(), checks_drafts=True,
    )  # fmt: skip
    captured: list[GraphKey] = []
    monkeypatch.setattr(graphs, "_captures", True)
    monkeypatch.setattr(graphs, "_capture", captured.append)
    graphs.capture_all([])
    assert [(key.size, key.in_runs) for key in captured] == [
        (4, True), (4, False), (2, True), (2, False), (1, False)
    ]  # fmt: skip
