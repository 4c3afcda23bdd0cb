"""All that a GPU must show, without pytest: `python -m tests.gpu.check [PART ...]`.

Exits 1 on a difference, with a line for each part that was checked. Parts are `kernels` (each one
beside its reference), `sampler` (a row alone and among others), `sampled` (graphs with every
sampling parameter), `shaped` (rows with a grammar, in two graphs), `guesses` (speculation beside
none), `launches` (early beside plain), `ranks` (a group of NCCL's beside none), `tiers` (device,
host, files and back), `parity` (engines beside the CPU's), `faults` (planted ones, which parity
must find), or a part's own name as its line begins: `parity:llama:bfloat16`. Most of the time is
compilation, which one process does on one core; so each part is a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DTYPES = ("float32", "bfloat16")
KERNEL_TESTS = (
    "attention", "attention_windows", "compressed", "hopper", "hopper_gemm", "decode_rows",
    "expert_adapters", "fp4", "fused", "index", "latent", "lora_ops", "moe", "moe_biased",
    "moe_tiles", "recurrent", "runs", "sampling", "scaled", "scaled_gemm", "fp8_rows",
    "fp8_pages", "early",
)  # fmt: skip


def parts() -> list[str]:
    """What there is to check, longest first."""
    from tests.gpu import guesses, launches, models, ranks, sampled, shaped, tiers

    return [
        *(f"parity:{kind}:{dtype}" for dtype in DTYPES for kind in reversed(models.KINDS)),
        *(f"launches:{kind}:bfloat16" for kind in launches.KINDS),
        *(f"guesses:{kind}:{dtype}" for dtype in DTYPES for kind in reversed(guesses.KINDS)),
        *(f"sampled:{kind}:{dtype}" for dtype in DTYPES for kind in sampled.KINDS),
        *(f"shaped:{kind}:{dtype}" for dtype in DTYPES for kind in shaped.KINDS),
        *(f"ranks:{kind}:{dtype}" for dtype in DTYPES for kind in ranks.KINDS),
        *(f"tiers:{kind}:{dtype}" for dtype in DTYPES for kind in tiers.KINDS),
        "faults:llama:bfloat16",
        *(f"kernels:{name}" for name in KERNEL_TESTS),
        "sampler:neighbours",
    ]


def check(part: str) -> str:
    """Raise AssertionError on a difference; else say what was compared."""
    what, _, rest = part.partition(":")
    modules = {
        "kernels": f"tests.unit.kernels.test_{rest}_triton",
        "sampler": f"tests.property.test_sampling_{rest}",
    }
    if what in modules:
        from tests.gpu.without_pytest import check as check_tests

        return check_tests(modules[what])
    from tests.gpu import faults, guesses, launches, parity, ranks, sampled, shaped, tiers

    rooms = {
        "faults": faults,
        "guesses": guesses,
        "launches": launches,
        "parity": parity,
        "ranks": ranks,
        "sampled": sampled,
        "shaped": shaped,
        "tiers": tiers,
    }
    kind, _, dtype = rest.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        return rooms[what].check(Path(folder), kind, dtype)


def main(wanted: list[str]) -> int:
    import torch

    if not torch.cuda.is_available():
        print("no GPU here: nothing was checked", file=sys.stderr)
        return 2
    begin = time.monotonic()
    chosen = [p for p in parts() if not wanted or any(p.startswith(w) for w in wanted)]
    if not chosen:
        print(f"no part is called {' or '.join(wanted)}; there are {', '.join(parts())}")
        return 2
    # More at once than there are cores would slow down the longest.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        failed = [p for p, code in zip(chosen, pool.map(_start, chosen), strict=True) if code != 0]
    seconds = time.monotonic() - begin
    if failed:
        print(f"{len(failed)} of {len(chosen)} parts differ: {', '.join(failed)} ({seconds:.0f} s)")
        return 1
    print(f"all {len(chosen)} parts agree ({seconds:.0f} s)")
    return 0


def _start(part: str) -> int:
    """Check a part in a process of its own; give its exit code."""
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-m", "tests.gpu.check", "--one", part]
    return subprocess.run(command, env={**os.environ, **quiet}).returncode


def one(part: str) -> int:
    from manyroots.runner import graphs

    graphs.CAPTURED_AT = 1  # Every kind of graph is compared, however short the batches are.
    begin = time.monotonic()
    try:
        line = check(part)
    except Exception:
        print(f"{part} DIFFERS\n{traceback.format_exc(limit=-4)}", flush=True)
        return 1
    print(f"{part} ok, {time.monotonic() - begin:.0f} s: {line}", flush=True)
    return 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(one(arguments[1]) if arguments[:1] == ["--one"] else main(arguments))
