"""What the page shows, as rows that can be compared: a snapshot joined with the server's own.

Takes the engine's snapshots and the server's metrics; gives the whole state, and what has changed
since the one before. Everything that leaves here is JSON without a prompt, a token or a salt.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import Any

from manyroots.api.state import Phase, ServerState, Service
from manyroots.gateway.replica_set import ReplicaSet
from manyroots.gateway.router_client import RouterClient
from manyroots.ids import AdapterName, RequestId
from manyroots.snapshot import MAX_STEPS, AdapterView, Snapshot, StepView, TreeView
from manyroots.version import __version__

RATE_WINDOW_S = 4.0
"""Tokens per second are of so many seconds."""
MAX_POINTS = 600
"""Of the charts: five minutes, at two a second."""

TableRows = dict[str, list[Any]]
Section = dict[str, TableRows]


class PageState:
    """The newest state of everything, and the last change of it."""

    def __init__(self, server: ServerState) -> None:
        self._server = server
        self.life = -1
        """Which engine process this is of, by the count of restarts."""
        self._rows: Section = {"requests": {}, "adapters": {}}
        self.steps: deque[StepView] = deque(maxlen=MAX_STEPS)
        self._names: dict[str, str] = {}
        self._memory: list[Any] = []
        self.settings: dict[str, int] = {}
        self._now: dict[str, Any] = {}
        self._history: deque[list[float]] = deque(maxlen=MAX_POINTS)
        self._totals: deque[tuple[float, int, int, int, int]] = deque()
        self.tree: dict[str, Any] | None = None
        self._nodes: TableRows = {}

    @property
    def since_step(self) -> int:
        """Steps up to this one are known to their end."""
        running = [step.step_id for step in self.steps if not step.milliseconds]
        last = self.steps[-1].step_id if self.steps else 0
        return min([number for number in running if number > last - 8], default=last + 1) - 1

    def take(self, snapshot: Snapshot | None) -> dict[str, Any]:
        """The engine as it is now, None if it is gone; gives what has changed."""
        server, service = self._server, self._server.loaded
        change: dict[str, Any] = {"now": self._take_now(snapshot)}
        if snapshot is not None and self.life != server.engine.num_restarts:
            self.life = server.engine.num_restarts
            self.steps.clear()
            self._names.clear()
            self._rows = {"requests": {}, "adapters": {}}
            self._nodes, self.tree = {}, None
            change["anew"] = True
        requests: TableRows = {}
        adapters: TableRows = {}
        if snapshot is not None and service is not None:
            requests = _requests(snapshot, service)
            adapters = _adapters(snapshot.adapters, service)
            self._take_steps(snapshot, change)
            memory = [list(part) for part in snapshot.memory]
            if memory != self._memory:
                self._memory = change["memory"] = memory
            if snapshot.settings != self.settings:
                self.settings = change["settings"] = snapshot.settings
        for name, rows in (("requests", requests), ("adapters", adapters)):
            changed, gone = difference(self._rows[name], rows)
            self._rows[name] = rows
            if changed:
                change[name] = changed
            if gone:
                change[f"gone_{name}"] = gone
        return change

    def whole(self) -> dict[str, Any]:
        return {
            "facts": self._facts(),
            "now": self._now,
            "history": list(self._history),
            **self._rows,
            "steps": list(self.steps),
            "names": self._names,
            "memory": self._memory,
            "settings": self.settings,
        }

    def take_tree(self, tree: TreeView) -> dict[str, Any]:
        """The tree as it is now; gives what has changed."""
        nodes = {str(node.node): list(node) for node in tree.nodes}
        changed, gone = difference(self._nodes, nodes)
        self._nodes = nodes
        self.tree = {
            "page_size": tree.page_size,
            "tick": tree.tick,
            "planes": tree.planes,
            "namespaces": tree.namespaces,
            "next_evicted": tree.next_evicted,
        }
        return {**self.tree, "nodes": changed, "gone_nodes": gone}

    def whole_tree(self) -> dict[str, Any] | None:
        return None if self.tree is None else {**self.tree, "nodes": self._nodes, "anew": True}

    # Inside

    def _take_steps(self, snapshot: Snapshot, change: dict[str, Any]) -> None:
        fresh = {step.step_id: step for step in snapshot.steps}
        if not fresh:
            return
        known = [step for step in self.steps if step.step_id not in fresh]
        self.steps.clear()
        self.steps.extend(known)
        self.steps.extend(fresh.values())
        names = {str(number): name for number, name in snapshot.adapter_names.items()}
        self._names |= names
        change["steps"] = list(fresh.values())
        if names:
            change["names"] = names

    def _take_now(self, snapshot: Snapshot | None) -> dict[str, Any]:
        server = self._server
        now: dict[str, Any] = {
            "at": round(time.time(), 3),
            "phase": server.phase.value,
            "restarts": server.engine.num_restarts,
        }
        if isinstance(server.engine, ReplicaSet | RouterClient):
            now["replicas"] = [dataclasses.asdict(view) for view in server.engine.replicas]
        progress = server.engine.progress
        if progress is not None:
            now["progress"] = [progress.stage, progress.done, progress.total]
        if server.loaded is not None and snapshot is not None:
            now |= self._numbers(server.loaded, snapshot)
        elif server.phase is not Phase.LOADING:
            now["waiting"] = 0 if server.engine.stats is None else server.engine.stats.num_waiting
        self._now = now
        return now

    def _numbers(self, service: Service, snapshot: Snapshot) -> dict[str, Any]:
        metrics, stats = service.metrics, snapshot.stats
        at_s = time.monotonic()
        total_in, total_out = metrics.total_prompt_tokens, metrics.total_generation_tokens
        totals = self._totals
        lookups, hits = stats.total_lookup_tokens, stats.total_hit_tokens
        if totals and totals[-1][3] > lookups:  # another engine, which counts from 0
            totals.clear()
        totals.append((at_s, total_in, total_out, lookups, hits))
        while len(totals) > 2 and totals[1][0] < at_s - RATE_WINDOW_S:
            totals.popleft()
        first = totals[0]
        seconds = max(at_s - first[0], 1e-3)
        rate_in = (total_in - first[1]) / seconds
        rate_out = (total_out - first[2]) / seconds
        first_token = metrics.recent_first_tokens.percentiles(0.5, 0.9, 0.99)
        between = metrics.recent_gaps.percentiles(0.5, 0.9, 0.99)
        point = [
            round(time.time(), 2), round(rate_in, 1), round(rate_out, 1), stats.num_running,
            stats.num_waiting, round(1000 * first_token[0], 2), round(1000 * between[0], 3),
        ]  # fmt: skip
        self._history.append(point)
        return {
            "point": point,
            "is_paused": snapshot.is_paused,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "paused": stats.num_paused,
            "requests": snapshot.num_requests,
            "total_in": total_in,
            "total_out": total_out,
            "steps": stats.total_steps,
            "lookups": lookups,
            "hits": hits,
            "host_hits": stats.total_host_hit_tokens - stats.total_storage_hit_tokens,
            "storage_hits": stats.total_storage_hit_tokens,
            "recent_hits": [hits - first[4], lookups - first[3]],
            "missed": stats.missed_tokens,
            "retractions": stats.total_retractions,
            "first_token_ms": [round(1000 * value, 2) for value in first_token],
            "between_ms": [round(1000 * value, 3) for value in between],
            "look_ms": round(1000 * snapshot.cpu_s, 3),
        }

    def _facts(self) -> dict[str, Any]:
        server, service = self._server, self._server.loaded
        facts: dict[str, Any] = {
            "version": __version__,
            "is_read_only": server.settings.admin_key is None,
            "can_load": server.settings.enable_lora_endpoints,
            "needs_api_key": server.settings.api_key is not None,
        }
        if service is not None:
            info = service.engine.info
            facts |= {
                "model": service.model_name,
                "has_chat": service.template is not None,
                "device": info.device,
                "dtype": info.dtype,
                "page_size": info.page_size,
                "max_model_len": info.max_model_len,
                "max_num_seqs": info.max_num_seqs,
                "max_loras": info.max_loras,
                "policy": info.scheduling_policy,
                "created": service.created,
            }
        return facts


def difference(before: TableRows, after: TableRows) -> tuple[TableRows, list[str]]:
    """Rows that are new or have changed, and the keys of those that are gone."""
    changed = {key: row for key, row in after.items() if before.get(key) != row}
    return changed, [key for key in before if key not in after]


def _requests(snapshot: Snapshot, service: Service) -> TableRows:
    rows: TableRows = {}
    for view in snapshot.requests:
        age_s = service.metrics.age_s(RequestId(view.request_id))
        if age_s is None and view.request_id <= 0:
            continue  # the engine's own checks
        # When it came, not how old it is: a request that only waits does not change.
        came = None if age_s is None else round(time.time() - age_s, 1)
        rows[str(view.request_id)] = [*view, came]
    return rows


_NUM_SHOWN = AdapterView._fields.index("left")
"""Fields of an adapter that the page has columns for."""


def _adapters(views: list[AdapterView], service: Service) -> TableRows:
    """What the engine knows, and names whose files were not read yet."""
    rows: TableRows = {}
    paths = {adapter.name: adapter.path for adapter in service.adapters.all()}
    for view in views:
        name = AdapterName(view.name)
        key = view.name if not view.is_draining else f"{view.name} {view.digest}"
        rows[key] = [*view[:_NUM_SHOWN], *service.metrics.reuse.of(name), paths.get(name, "")]
    for name, path in paths.items():
        if name not in rows:
            unread = AdapterView(name, "", "storage", "unread", False, False, 0, 0, 0, 0, 0, 0)
            rows[name] = [*unread[:_NUM_SHOWN], *service.metrics.reuse.of(name), path]
    return rows
