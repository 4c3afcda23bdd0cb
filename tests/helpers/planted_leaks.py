"""Leaks to plant in a running server, one at a time, which `manyroots conformance` must find.

`Leaks(folder).env` is an environment for a server's processes: each imports this file at its start,
changes some methods, and asks a file which leak is on whenever one of them runs. So one server has
them all, in turn. Without a leak it is the real server, but that tiers are loaded from, whatever
time that takes.
"""

from __future__ import annotations

import hashlib
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

FILE = "MANYROOTS_TEST_LEAK"
LEAKS = {
    "key": "pages are found without the adapter in their key",
    "salt": "the salt is left out of the key",
    "api_key": "what a key computed is found by another",
    "revision": "pages belong to an adapter's name, whatever its content",
    "stale": "a name that is loaded again keeps its old weights",
    "tier": "keys of stored pages leave the namespace out",
    "event": "events leave adapter and salt out",
    "case": "names of adapters are folded to lower case",
    "unicode": "names and salts are normalised",
    "reason": "why a prompt was cold tells of other tenants' prompts",
    "deep": "a party that knows the first page of a prompt finds all that others have of it",
    "batch": "all tokens of a step are computed with one adapter",
    "drafts": "drafts come from the output of every namespace",
    "times": "salts share pages, and the answer says that nothing was found",
}


class Leaks:
    """Switches a server's leaks."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "leak"
        (folder / "sitecustomize.py").write_text(
            "import tests.helpers.planted_leaks as p; p.plant()\n"
        )
        paths = (str(folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), FILE: str(self._file)}

    @contextmanager
    def planted(self, leak: str) -> Iterator[None]:
        assert leak in LEAKS
        self._file.write_text(leak)
        try:
            yield
        finally:
            self._file.unlink()


def is_on(*leaks: str) -> bool:
    try:
        return Path(os.environ[FILE]).read_text() in leaks
    except FileNotFoundError:
        return False


def plant() -> None:
    sys.meta_path.insert(0, _Planter())


class _Planter(MetaPathFinder):
    """Changes a room once the module is wanted that uses it."""

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> None:
        for change in _CHANGES.pop(name, ()):
            change()


def _after(room: type[Any], method: str, change: Callable[..., Any]) -> None:
    """`change` gets the original and its arguments."""
    original = getattr(room, method)
    setattr(room, method, lambda *given, **named: change(original, *given, **named))


# The engine's process


def _keys_of_pages() -> None:
    from manyroots.cache.keys import PrefixKey
    from manyroots.ids import AdapterDigest, Namespace
    from manyroots.scheduler.request import Request

    def made(original: Callable[..., None], request: Any, *given: Any) -> None:
        original(request, *given)
        owner = request.key.at(0).namespace
        if is_on("key"):
            request.key = PrefixKey(Namespace(None, owner.salt))
        elif is_on("salt", "times"):
            request.key = PrefixKey(Namespace(owner.adapter, None))
        elif is_on("revision") and request.hold is not None:
            named = hashlib.sha256(request.hold.version.name.encode()).digest()
            request.key = PrefixKey(Namespace(AdapterDigest(named), owner.salt))

    _after(Request, "__init__", made)


def _paths() -> None:
    from manyroots.cache.holding import Holder
    from manyroots.cache.keys import PrefixKey

    def walk(original: Callable[..., Any], holder: Any, key: Any, tokens: Any) -> Any:
        found = original(holder, key, tokens)
        if not is_on("deep") or found[1] == 0:
            return found
        known = list(holder._tree.by_namespace)
        others = [original(holder, PrefixKey(namespace), tokens) for namespace in known]
        return max([found, *others], key=lambda each: each[1])

    _after(Holder, "walk", walk)


def _keys_in_storage() -> None:
    from manyroots.cache.costs import Costs
    from manyroots.cache.keys import Owner, PageHasher
    from manyroots.ids import Namespace

    def seed(original: Callable[..., bytes], hasher: Any, owner: Any) -> bytes:
        return original(hasher, Owner(Namespace(None, None), 0) if is_on("tier") else owner)

    _after(PageHasher, "_seed", seed)
    _after(Costs, "is_worth_loading", lambda *_: True)
    _after(Costs, "is_worth_fetching", lambda *_: True)


def _reasons() -> None:
    from manyroots.cache.tree import PrefixTree

    def has_elsewhere(
        original: Callable[..., bool], tree: Any, key: Any, page: bytes, walk: Any
    ) -> bool:
        if is_on("reason") and walk.depth == 0:
            return any(known == page for _, known in +tree.first_pages)
        return original(tree, key, page, walk)

    _after(PrefixTree, "has_elsewhere", has_elsewhere)


def _rows_of_a_step() -> None:
    from manyroots.runner.batch import PersistentBatch

    def token_slots(original: Callable[..., Any], *given: Any) -> Any:
        slots = original(*given)
        if is_on("batch") and slots is not None:
            slots[:] = slots.max()
        return slots

    _after(PersistentBatch, "_token_slots", token_slots)


def _recent_outputs() -> None:
    from manyroots.scheduler.suffixes import RecentOutputs

    for method in ("add", "of"):
        _after(
            RecentOutputs, method,
            lambda original, outputs, group, *output: original(
                outputs, (None, None) if is_on("drafts") else group, *output
            ),
        )  # fmt: skip


def _events() -> None:
    from manyroots.engine import kv_events

    original = kv_events.to_wire

    def to_wire(*given: Any) -> Any:
        event = original(*given)
        if is_on("event") and isinstance(event, kv_events.BlockStored):
            event.lora_name, event.extra_keys = None, None
        return event

    kv_events.to_wire = to_wire


def _loads() -> None:
    from manyroots.adapter_names import LoraModule
    from manyroots.engine import adapter_directory

    def opened(
        original: Callable[..., None], directory: Any, entry: Any, read: Any, load: Any
    ) -> None:
        is_known = entry.name in directory._registry.loaded
        if is_on("stale") and is_known and load is not None:
            entry.module = LoraModule(entry.name, load.path)
            directory._replies.append(adapter_directory._loaded(load.op_id, read, False))
        else:
            original(directory, entry, read, load)

    _after(adapter_directory.AdapterDirectory, "_open", opened)


# The API's process


def _folded(text: str) -> str:
    if is_on("case"):
        return text.lower()
    return unicodedata.normalize("NFKC", text) if is_on("unicode") else text


def _names() -> None:
    from manyroots.api import lora
    from manyroots.api.adapters import Adapters
    from manyroots.engine.adapter_table import AdapterTable
    from manyroots.ids import AdapterName

    for holder, method in ((AdapterTable, "get"), (Adapters, "get"), (Adapters, "_named")):
        _after(
            holder, method,
            lambda original, adapters, name, *more: original(adapters, _folded(name), *more),
        )  # fmt: skip
    lora.AdapterName = lambda name: AdapterName(_folded(name))  # type: ignore[assignment]


def _tenants() -> None:
    from manyroots.api import preprocess

    original = preprocess.salt_of

    def salt_of(request: Any) -> Any:
        salt = original(request)
        if is_on("api_key"):
            salt = request.cache_salt
        if is_on("unicode") and salt is not None:
            salt = _folded(salt)
        return salt

    preprocess.salt_of = salt_of


def _usage() -> None:
    from manyroots.api.generation import UsageCount
    from manyroots.api.responses import PromptTokensDetails

    _after(
        UsageCount, "_details",
        lambda original, count: PromptTokensDetails(0) if is_on("times") else original(count),
    )  # fmt: skip


_CHANGES: dict[str, tuple[Callable[[], None], ...]] = {
    # The engine's process has imported all of the engine by then, the API's nothing of its routes.
    "manyroots.engine.wire": (
        _keys_of_pages,
        _paths,
        _keys_in_storage,
        _reasons,
        _rows_of_a_step,
        _recent_outputs,
        _events,
        _loads,
    ),
    "manyroots.api.app": (_names, _tenants, _usage),
}
