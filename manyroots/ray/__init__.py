"""Replicas on Ray. `serve run manyroots.ray:app` deploys a gateway and its engines."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`app`, when it is asked for: an engine in an actor needs no Ray Serve."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from manyroots.ray.application import app

    return app
