"""Traffic launches only what the start of an engine has compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytest.importorskip("triton", reason="triton is not installed: the GPU kernels are NOT tested")

SCRIPT = """
import sys
from pathlib import Path

from tests.gpu.launch_kinds import compare, difference

at_start, only = compare(sys.argv[1], Path("."), num_requests=24)
assert len(at_start) > 60, len(at_start)
print(*(f"{kind[0]}: {difference(kind, at_start)}" for kind in only), sep="\\n", end="")
"""


@pytest.mark.parametrize(
    "shape", ["qwen3-8b", pytest.param("qwen3-8b+r8", marks=pytest.mark.nightly)]
)
def test_s04_traffic_launches_only_kernels_that_the_start_compiles(
    shape: str, tmp_path: Path
) -> None:
    """S04: as on a Hopper GPU, with adapters of two ranks in one memory, or of rank 8 alone: steps
    of all sizes, kernel by kernel and padded; prefixes that rows share; sampling of all kinds."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, shape], capture_output=True, text=True, check=False, env=env,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    kinds = [line for line in done.stdout.splitlines() if not line.startswith("  ")]
    assert kinds == []
