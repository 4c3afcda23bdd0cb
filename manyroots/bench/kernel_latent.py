"""Latent attention of a layer alone: absorbed decodes, and prompts with expanded keys and values.

Takes a layer's shape and sequences in numbers; gives cases for `kernel_times.py`, each compared
with the naive reference. Pages lie in random order, and layers are read in turn, so that none is in
a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyroots.bench.kernel_attention import Pages, Sequences, randn, spread_out
from manyroots.bench.kernel_times import KernelCase, measured
from manyroots.kernels.choice import Kernels
from manyroots.kernels.latent import reference
from manyroots.kernels.latent.inputs import KeyPiece, SplitKeys
from manyroots.layers.spec import LatentSpec

FEW_CHECKED = 4
"""Queries of prompts that are compared with the reference, which takes them one by one."""


def measure_latent_decodes(
    spec: LatentSpec,
    sequences: Sequences,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
) -> dict[str, Any]:
    """One query for each sequence, which sees all of it."""
    lens = np.array([sequences.before + length for length in sequences.lens])
    # As if there were no index: queries see all of a sequence.
    memory = replace(spec.memory, index=0, num_chosen=None)
    step = Pages(memory, lens, dtype, device)
    q = randn(step.generator, len(lens), spec.num_heads, memory.latent + memory.rope, dtype=dtype)
    num_pairs = int(lens.sum()) * spec.num_heads
    case = KernelCase(
        part="decodes", name="latents", rows=sequences.text, way="ours",
        num_bytes=memory.unit_bytes(int(lens.sum()), 1, dtype),
        num_flops=2.0 * num_pairs * (2 * memory.latent + memory.rope), tolerance="attention",
    )  # fmt: skip

    def make() -> list[Callable[[], Tensor]]:
        return [
            partial(
                kernels.latent.latent_decode, q, pages, step.table, step.lens, spec.scale,
                memory.latent,
            )
            for pages in step.layers
        ]  # fmt: skip

    def compare(out: Tensor) -> tuple[Tensor, Tensor]:
        at = spread_out(len(lens)).to(device)
        right = reference.latent_decode(
            q[at], step.layers[0], step.table[at], step.lens[at], spec.scale, memory.latent
        )
        return out[at], right

    return measured(case, make, compare, repeats, device)


def measure_latent_prompts(
    spec: LatentSpec,
    sequences: Sequences,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
) -> dict[str, Any]:
    """All queries of each prompt, over keys and values that are expanded already."""
    counts = np.array(sequences.lens)
    lens = counts + sequences.before
    num_queries, num_keys = int(counts.sum()), int(lens.sum())
    heads, key_dim = spec.num_heads, spec.nope + spec.memory.rope
    generator = torch.Generator(device).manual_seed(1)
    q = randn(generator, num_queries, heads, key_dim, dtype=dtype)
    both = randn(generator, num_keys, heads, spec.nope + spec.value_dim, dtype=dtype)
    shared = randn(generator, num_keys, spec.memory.rope, dtype=dtype)
    own, v = both[..., : spec.nope], both[..., spec.nope :]
    piece = KeyPiece(
        int32(0, *accumulate(counts.tolist()), device=device),
        int32(0, *accumulate(lens.tolist()), device=device),
        int32(*[sequences.before] * len(counts), device=device),
        int(counts.max()),
    )  # fmt: skip
    num_pairs = int((counts * (counts + 1) // 2 + counts * sequences.before).sum()) * heads
    case = KernelCase(
        part="prompts", name="latents", rows=sequences.text, way="ours",
        num_bytes=sum(x.numel() * x.element_size() for x in (q, both, shared)),
        num_flops=2.0 * num_pairs * (key_dim + spec.value_dim), tolerance="attention",
    )  # fmt: skip

    def make() -> list[Callable[[], Tensor]]:
        return [
            lambda: kernels.latent.attend_piece(q, SplitKeys(own, shared), v, piece, spec.scale)[0]
        ]

    def compare(out: Tensor) -> tuple[Tensor, Tensor]:
        """The last queries of the first prompt, which see the most."""
        count, length = int(counts[0]), int(lens[0])
        few = min(FEW_CHECKED, count)
        last = KeyPiece(
            int32(0, few, device=device), int32(0, length, device=device),
            int32(length - few, device=device), few,
        )  # fmt: skip
        right, _ = reference.attend_piece(
            q[count - few : count],
            SplitKeys(own[:length], shared[:length]),
            v[:length],
            last,
            spec.scale,
        )
        return out[count - few : count], right

    return measured(case, make, compare, repeats, device)


def int32(*numbers: int, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)
