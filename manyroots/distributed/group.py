"""The process group of one engine: how its ranks find each other, and how they part.

Takes a rank's place and a folder that only this engine's ranks can reach; the folder's file is
where they meet. CPU tensors go through gloo on the loopback interface, GPU tensors through NCCL.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from manyroots.distributed.shard import Shard
from manyroots.errors import ConfigError

COLLECTIVE_TIMEOUT_S = 60.0
"""How long a rank waits for the others inside one operation. A rank that died is noticed at once
through its channel; this bounds the wait for one that hangs."""


def join_group(shard: Shard, folder: Path, *, device_type: str) -> None:
    """Meet the other ranks; waits until all are there."""
    if not dist.is_available():
        raise ConfigError(
            f"--tensor-parallel-size is {shard.size}, but this build of torch has no "
            "torch.distributed; use 1, or install torch with it."
        )
    if dist.is_initialized():
        raise ConfigError(
            "--tensor-parallel-size above 1 needs torch.distributed for itself, and this process "
            "already has a process group; close the other engine, or run this one by "
            "`manyroots serve`."
        )
    # Ranks of one engine are on one machine: no other machine should reach their sockets, and the
    # machine's own name need not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder / 'meeting'}",
        rank=shard.rank,
        world_size=shard.size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )


def leave_group() -> None:
    """Give the group back; nothing to do if there is none."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
