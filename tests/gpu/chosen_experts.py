"""How many experts a decode step reads: `python -m tests.gpu.chosen_experts NAME ROWSxTOKENS ...`.

NAME is one of `bench decode`'s shapes. Its floor counts as many experts as tokens that choose at
random would; this counts those that rows of random prompts choose with random weights. Steps run
without graphs. Prints a line for each case, with the least and the most of any layer and step.
`--device cpu` and `--layers N` after the cases try it without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from manyroots.bench.decode import _Batch
from manyroots.bench.model_configs import write_config
from manyroots.config import engine_settings
from manyroots.engine.build import build_engine
from manyroots.kernels.choice import kernels_for
from manyroots.models.load import describe
from manyroots.models.roofline import expected_experts
from manyroots.models.source import resolve_source

OUTPUT_LEN = 24
PAGE_SIZE = 128


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int)
    asked = parser.parse_args(arguments)
    sizes = [tuple(map(int, case.split("x"))) for case in asked.cases]
    module: Any = kernels_for(torch.device(asked.device)).fused_moe
    route: Any = module.route
    counts: dict[int, list[int]] = {rows: [] for rows, _ in sizes}

    def counting(scores: Tensor, top_k: int, *args: Any, **options: Any) -> Any:
        routing = route(scores, top_k, *args, **options)
        if len(routing.experts) in counts:
            counts[len(routing.experts)].append(len(routing.experts.unique()))
        return routing

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(module, "route", counting):
        settings = {
            "model": str(write_config(asked.name, Path(folder), asked.layers)),
            "load_format": "dummy", "device": asked.device, "enforce_eager": True,
            "enable_prefix_caching": False, "block_size": PAGE_SIZE,
            "max_model_len": max(tokens for _, tokens in sizes) + OUTPUT_LEN + 64,
            "max_num_seqs": max(rows for rows, _ in sizes), "max_num_batched_tokens": 8192,
        }  # fmt: skip
        spec = describe(resolve_source(engine_settings(settings).model))
        block = next(layer.experts for layer in spec.layers if layer.experts is not None)
        engine = build_engine(engine_settings(settings))
        try:
            for rows, tokens in sizes:
                counts[rows].clear()
                _Batch(engine, tokens, rows, range(0)).run(num_tokens=1 + OUTPUT_LEN)
                found, expected = counts[rows], expected_experts(block, rows)
                print(
                    f"{rows} rows after {tokens} tokens: {mean(found):.1f} experts "
                    f"({min(found)} to {max(found)}, {len(found)} counts), "
                    f"{expected:.1f} expected of {block.num_experts}",
                    flush=True,
                )
        finally:
            engine.loop.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
