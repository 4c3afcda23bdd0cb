"""Makes tiers worth their time whatever this machine's clock says (R06).

An engine does not use a tier that it measured to be slower than computing (T05), and continues
without storage that has not answered in time. On a busy machine either happens now and then, and a
test that counts loaded pages would fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from manyroots.cache.costs import Costs
from manyroots.engine import tiers
from manyroots.store.backends.backend import Backend
from manyroots.store.storage_link import UnitStorage
from tests.helpers.patience import PATIENCE_S


@contextmanager
def worth_loading() -> Iterator[None]:
    """Always load what a tier has, however long that took before."""
    with (
        mock.patch.object(Costs, "is_worth_loading", return_value=True),
        mock.patch.object(Costs, "is_worth_fetching", return_value=True),
    ):
        yield


@contextmanager
def quick_tiers() -> Iterator[None]:
    """The same, and always wait for storage."""

    def patient(backend: Backend, timeout_s: float, rank: int, num_ranks: int) -> UnitStorage:
        return UnitStorage(backend, PATIENCE_S, rank, num_ranks)

    with worth_loading(), mock.patch.object(tiers, "UnitStorage", patient):
        yield


def worth_loading_there(folder: Path) -> dict[str, str]:
    """An environment for processes; `folder` is for a file that their interpreter finds."""
    (folder / "sitecustomize.py").write_text(_PATCH)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


_PATCH = """
import sys
from importlib.abc import MetaPathFinder

class Patch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "manyroots.cache.cache":  # which uses it
            from manyroots.cache.costs import Costs
            Costs.is_worth_loading = Costs.is_worth_fetching = lambda *_: True
        return None

sys.meta_path.insert(0, Patch())
"""
