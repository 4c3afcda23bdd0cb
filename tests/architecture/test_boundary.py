"""The scheduler speaks with the cache over one boundary, and knows no family (H01).

A list of words would let `cache.layout.device[0].family` pass. What is checked are the names of
attributes: of all that classes of the cache's room define, scheduler code may use these alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "manyroots"
SCHEDULER = sorted((PACKAGE / "scheduler").glob("*.py"))
IMPORTS = {
    "cache.cache", "cache.events", "cache.keeping", "cache.keys", "cache.lease", "cache.outcomes",
    "cache.prefetch",
}  # fmt: skip
BOUNDARY = {
    "evict_all", "change_weights", "num_freed", "num_leases",
    # What is asked of the cache
    "acknowledge", "announce", "begin", "blame_storage", "can_reach", "claim", "clip", "commit",
    "commit_step",
    "could_find_more", "evict_adapter", "evict_prefix", "extend", "fail_step", "has_keeps",
    "has_transfers",
    "host_room", "keep", "left_storage_alone", "let_go", "may_overlap", "measured_prefill",
    "num_keeps", "num_resumable_tokens", "onboard", "page_size", "pass_time", "prefer_own",
    "prefetch", "release", "stats", "take_copies", "take_keeps", "take_events", "next_pages",
    "common_run", "has_room_for", "least_shared_pages", "save_at",
    "draft", "most_drafts", "accept", "has_states",
    # Memory that the cache lends
    "loans", "least_units", "num_reserved", "is_short", "lend", "num_lent_units", "next_use",
    "num_lendable_units", "num_idle_units", "num_kept_units", "take_back", "take_new", "returns",
    "unit_s", "num_uses",
    # What a lease, a ticket and a key say of themselves
    "activated", "checkpoints", "has_failed", "is_done", "is_ready", "is_worth_going_on", "kept",
    "num_cached_tokens", "refusal",
    "label", "limit", "num_covered_tokens", "num_found_pages", "num_host_tokens",
    "num_published_pages", "onboarding", "patience_steps", "tables",
    # Numbers for metrics and logs
    "held_by", "missed_tokens", "num_cached", "num_free", "num_held", "num_units", "planes",
    "storage", "tier", "total_hit_tokens", "total_host_hit_tokens", "total_lookup_tokens",
    "total_skipped_checkpoints",
}  # fmt: skip
CACHE_VARIABLES = {"cache", "_cache", "lease", "ticket"}


def defined(paths: Iterable[Path]) -> set[str]:
    """Public attributes and methods of the classes in these files."""
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return {name for name in found if not name.startswith("_")}


INSIDE = defined((PACKAGE / "cache").rglob("*.py"))
OUTSIDE = defined(
    [*SCHEDULER, *(PACKAGE / "lora").rglob("*.py"), *PACKAGE.glob("*.py")]
) | set().union(*(dir(kind) for kind in (dict, list, set, str)))
"""Names that something else than the cache has, too."""


def trespasses(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).rpartition(".")[2]
            is_inside = node.attr in INSIDE and node.attr not in OUTSIDE
            if (is_inside or owner in CACHE_VARIABLES) and node.attr not in BOUNDARY:
                yield f"line {node.lineno}: {ast.unparse(node)} is no part of the boundary"
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            name = node.module.removeprefix("manyroots.")
            if name.partition(".")[0] == "cache" and name not in IMPORTS:
                yield f"line {node.lineno}: {name} is inside the cache"
        elif isinstance(node, ast.Name) and node.id in ("getattr", "vars", "attrgetter"):
            yield f"line {node.lineno}: {node.id} hides what is read"


@pytest.mark.parametrize("path", SCHEDULER, ids=lambda path: path.stem)
def test_h01_the_scheduler_uses_the_boundary_alone(path: Path) -> None:
    """H01: one boundary between scheduler and cache; scheduler code reads no family."""
    assert list(trespasses(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "code",
    [
        "self._cache.layout",
        "[p for p in somewhere.layout]",
        "any(plane.family.is_state for plane in x)",
        "lease.first_live",
        "cache.index.pools[0]",
        "getattr(thing, 'lay' + 'out')",
        "from manyroots.cache.families.window import SlidingWindow",
    ],
)
def test_the_check_sees_what_is_inside_the_cache(code: str) -> None:
    assert list(trespasses(ast.parse(code)))


def test_every_name_of_the_boundary_is_used() -> None:
    used = {
        node.attr
        for path in SCHEDULER
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert not BOUNDARY - used, "no part of the boundary any more"
