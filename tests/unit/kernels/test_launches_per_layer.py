"""How many kernels a layer of a decode step launches, with adapters and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytest.importorskip("triton", reason="triton is not installed: the GPU kernels are NOT tested")

SCRIPT = """
import json
import sys

from tests.gpu.launches_per_layer import last_layer

name, num_rows = sys.argv[1:]
print(json.dumps(last_layer(name, int(num_rows))))
"""


@pytest.mark.parametrize(
    ("name", "num_rows", "base", "adapters"),
    [
        ("deepseek-v2-lite", 8, 12, 13), ("deepseek-v2-lite", 64, 15, 16),
        ("qwen3-30b-a3b", 64, 9, 9),
    ],
)  # fmt: skip
def test_f07_adapters_cost_few_launches(name: str, num_rows: int, base: int, adapters: int) -> None:
    """F07: of V2-Lite's, one completes queries and latents."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, str(num_rows)], capture_output=True, text=True,
        check=False, env=env | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [len(names) for names in found] == [base, adapters], found
