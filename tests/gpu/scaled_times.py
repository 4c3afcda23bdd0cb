"""How fast products with FP8 weights are, in many ways to compute them: `python -m
tests.gpu.scaled_times [few | many | compile]`, on a GPU. No check, but for how far each way is off.

`few`: rows of a decode step times the weights of Qwen3-8B, as bytes of weights per second; the best
tilings of each way. Ways differ in what rows are when they come, and in what is multiplied:

    bf16     bfloat16 rows; FP8 becomes bfloat16 in registers
    f16      float16 rows; FP8 becomes float16 in registers
    fp8      rows in FP8, multiplied as they are
    fp8x2    rows in two FP8 numbers each, a large one and what is left of 16 times the rest
    packed   f16, with FP8 read four to a word
    packedb  the same with bfloat16 rows: float16 becomes bfloat16 by shifts and a product
`many`: rows of a prompt, as operations per second; the library's products beside ours.

Compiling takes longest, so processes share it and leave what they compile in the cache.
"""

# ruff: noqa: N803  (constants of kernels are in capitals, as in the package's own)

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.fp8_rows import Fp8Form
from manyroots.kernels.gemm import triton as gemm
from manyroots.kernels.launch import (
    launch_options,
    let_next_begin,
    prefetch,
    wait_for_inputs,
)
from manyroots.kernels.scaled import ScaledMatrix
from manyroots.kernels.scaled_gemm import triton as scaled_gemm
from manyroots.kernels.triton_fp8_rows import in_fp8

SHAPES = {
    "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288),
    "head": (151936, 4096),
}  # fmt: skip
FEW = (8, 64, 128, 256)
MANY = (128, 256, 512, 2048, 8192)
COLD_BYTES = 320 * 2**20
"""Of weights that are read in turn, so that none is still in the cache."""
REPLAYS, ROUNDS = 3, 3
NUM_PROCESSES = 14
WAYS = ("bf16", "f16", "fp8", "fp8x2", "packed", "packedb")


@dataclass(frozen=True, slots=True)
class Way:
    """One kernel, compiled."""

    name: str
    block_n: int
    block_k: int
    stages: int
    warps: int
    is_tma: bool = False


def ways(block_m: int) -> list[Way]:
    """That are tried with so many rows."""
    found = []
    tilings = [
        (64, 128, 4, 4), (64, 128, 6, 4), (64, 128, 8, 4), (64, 256, 3, 4), (64, 256, 4, 4),
        (64, 256, 5, 4), (128, 128, 3, 4), (128, 128, 4, 8), (128, 128, 6, 8), (128, 256, 3, 8),
    ]  # fmt: skip
    for name, tiling in itertools.product(WAYS, tilings):
        rows = 2 * block_m if name == "fp8x2" else block_m
        width = 1 if name.startswith("fp8") else 2
        needed = tiling[2] * tiling[1] * (tiling[0] + rows * width)
        if needed > 220_000 or (name.startswith("packed") and tiling[1] != 128):
            continue
        if block_m > 64 and not (name.startswith("fp8") and tiling[0] == 128):
            continue
        found.append(Way(name, *tiling))
        if name.startswith("fp8"):
            found.append(Way(name, *tiling, is_tma=True))
    return found


@triton.jit
def _halves(words):
    """Four FP8 numbers of each word as float16."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .b32 first, second;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 first, low;
        cvt.rn.f16x2.e4m3x2 second, high;
        mov.b32 {$0, $1}, first;
        mov.b32 {$2, $3}, second;
        }""",
        "=h,=h,=h,=h,r", [words],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _brains(words):
    """Four FP8 numbers of each word as bfloat16."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .b32 first, second, sign1, sign2, most;
        mov.b32 {low, high}, $4;
        mov.b32 most, 0x77807780;
        cvt.rn.f16x2.e4m3x2 first, low;
        cvt.rn.f16x2.e4m3x2 second, high;
        and.b32 sign1, first, 0x80008000;
        and.b32 sign2, second, 0x80008000;
        shr.b32 first, first, 3;
        shr.b32 second, second, 3;
        lop3.b32 first, first, 0x0fff0fff, sign1, 0xea;
        lop3.b32 second, second, 0x0fff0fff, sign2, 0xea;
        mul.rn.bf16x2 first, first, most;
        mul.rn.bf16x2 second, second, most;
        mov.b32 {$0, $1}, first;
        mov.b32 {$2, $3}, second;
        }""",
        "=h,=h,=h,=h,r", [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _few(
    x, w, w_scales, out, num_rows, n_size, k_size,
    WAY: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    split = tl.program_id(1)
    steps = tl.cdiv(k_size // BLOCK_K, tl.num_programs(1))
    first = split * steps * BLOCK_K
    last = tl.minimum(k_size, first + steps * BLOCK_K)
    at_n = tl.program_id(0) * BLOCK_N
    n = at_n + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    if not TMA:
        rows = tl.minimum(n, n_size - 1).to(tl.int64)
        if WAY == "packed" or WAY == "packedb":
            word = tl.arange(0, BLOCK_K // 4)
            w_at = w + rows[:, None] * (k_size // 4) + word[None, :]
        else:
            w_at = w + rows[:, None] * k_size + k[None, :]
            line = tl.arange(0, BLOCK_K // 128) * 128
            prefetch(w + rows[:, None] * k_size + first + line[None, :], DEPENDENT)
    wait_for_inputs(DEPENDENT)
    x_at = x + m[:, None] * k_size + k[None, :]
    is_row = (m < num_rows)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    rest = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for at in range(first, last, BLOCK_K):
        if TMA:
            weight = w.load([at_n, at])
        elif WAY == "packed" or WAY == "packedb":
            weight = tl.load(w_at + at // 4, eviction_policy="evict_first")
        else:
            weight = tl.load(w_at + at, eviction_policy="evict_first")
        xs = tl.load(x_at + at, mask=is_row, other=0.0)
        if WAY == "fp8" or WAY == "fp8x2":
            acc = tl.dot(weight, tl.trans(xs), acc)
            if WAY == "fp8x2":
                small = tl.load(x_at + num_rows * k_size + at, mask=is_row, other=0.0)
                rest = tl.dot(weight, tl.trans(small), rest)
        elif WAY == "packed" or WAY == "packedb":
            if WAY == "packed":
                w0, w1, w2, w3 = _halves(weight)
            else:
                w0, w1, w2, w3 = _brains(weight)
            even, odd = tl.split(tl.reshape(xs, (BLOCK_M, BLOCK_K // 4, 2, 2)))
            x0, x2 = tl.split(even)
            x1, x3 = tl.split(odd)
            acc = tl.dot(w0, tl.trans(x0), acc)
            acc = tl.dot(w1, tl.trans(x1), acc)
            acc = tl.dot(w2, tl.trans(x2), acc)
            acc = tl.dot(w3, tl.trans(x3), acc)
        else:
            acc = tl.dot(weight.to(xs.dtype), tl.trans(xs), acc)
    if WAY == "fp8x2":
        acc += rest * 0.0625
    acc *= tl.load(w_scales + tl.minimum(n, n_size - 1))[:, None]
    to = out + (split * num_rows + m[:, None]).to(tl.int64) * n_size + n[None, :]
    tl.store(to, tl.trans(acc), mask=is_row & (n < n_size)[None, :])


def rows_for(way: str, x: Tensor) -> Tensor:
    """Rows as the way takes them."""
    if way in ("bf16", "packedb"):
        return x
    if way in ("f16", "packed"):
        return x.half()
    large = x.to(torch.float8_e4m3fn)
    if way == "fp8":
        return large
    return torch.cat((large, ((x.float() - large.float()) * 16).to(torch.float8_e4m3fn)))


def run_few(way: Way, x: Tensor, weight: ScaledMatrix, splits: int, num_rows: int) -> Tensor:
    """The product, in partial sums; x is what `rows_for` gave."""
    n_size, k_size = weight.shape
    kind = torch.bfloat16 if splits == 1 else torch.float32
    out = torch.empty(splits, num_rows, n_size, dtype=kind, device=x.device)
    w: Any = weight.data
    if way.is_tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        w = TensorDescriptor(w, list(w.shape), list(w.stride()), [way.block_n, way.block_k])
    elif way.name.startswith("packed"):
        w = w.view(torch.int32)
    _few[(triton.cdiv(n_size, way.block_n), splits)](
        x, w, weight.scales, out, num_rows, n_size, k_size, WAY=way.name, TMA=way.is_tma,
        BLOCK_M=max(16, triton.next_power_of_2(num_rows)), BLOCK_N=way.block_n,
        BLOCK_K=way.block_k, num_stages=way.stages, num_warps=way.warps,
        **launch_options(x.device),
    )  # fmt: skip
    return out


def seeded() -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(1)


def random_weight(n: int, k: int) -> ScaledMatrix:
    data = torch.empty(n, k, dtype=torch.uint8, device="cuda")
    data.random_(0, 0x70, generator=seeded())
    scales = torch.rand(n, 1, device="cuda", generator=seeded()) * 0.01
    return ScaledMatrix(data.view(torch.float8_e4m3fn), scales, k)


def random_rows(num_rows: int, k: int) -> Tensor:
    return torch.randn(num_rows, k, device="cuda", generator=seeded()).bfloat16()


def microseconds(calls: list[Callable[[], Any]]) -> float:
    """Of one of them, in a graph; the best of some rounds."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / REPLAYS / len(calls))
    return min(times)


def compile_few(part: int, parts: int) -> None:
    """Compile every `parts`-th way, and say nothing of those that fail."""
    weight = random_weight(256, 4096)
    every = [(rows, way) for rows in FEW for way in ways(max(16, rows))]
    for rows, way in every[part::parts]:
        for splits in (1, 2):
            try:
                run_few(way, rows_for(way.name, random_rows(rows, 4096)), weight, splits, rows)
                torch.cuda.synchronize()
            except Exception:
                pass


def measure_few(results: list[dict[str, Any]]) -> None:
    failed: dict[Way, str] = {}
    for shape, (n, k) in SHAPES.items():
        copies = max(2, -(-COLD_BYTES // (n * k)))
        weights = [random_weight(n, k) for _ in range(copies)]
        plain = [w.plain(torch.bfloat16) for w in weights[: max(2, copies // 2)]]
        for num_rows in FEW:
            x = random_rows(num_rows, k)
            exact = x.float() @ weights[0].plain(torch.float32).T
            found: list[tuple[float, str, float]] = []
            for name, us, size in baselines(x, weights, plain):
                speed = f"{us:8.1f} us {size / us / 1e3:6.0f} GB/s"
                print(f"{shape:8} {num_rows:4} rows  {name:34} {speed}")
            for way in ways(max(16, num_rows)):
                if way in failed:
                    continue
                rows = rows_for(way.name, x)
                for splits in (1, 2, 4, 8):
                    programs = -(-n // way.block_n) * splits
                    if (splits > 1 and programs > 600) or k // way.block_k % splits:
                        continue
                    try:
                        out = run_few(way, rows, weights[0], splits, num_rows)
                        error = (out.float().sum(0) - exact).norm() / exact.norm()
                        us = microseconds(
                            [partial(run_few, way, rows, w, splits, num_rows) for w in weights]
                        )
                    except Exception as reason:
                        failed[way] = str(reason).strip().split("\n")[0][:120]
                        break
                    label = f"{way.name}{' tma' if way.is_tma else ''}"
                    tiling = (way.block_n, way.block_k, way.stages, way.warps)
                    found.append((us, f"{label:9} {tiling} x{splits}", float(error)))
                    results.append({
                        **asdict(way), "shape": shape, "rows": num_rows, "splits": splits,
                        "us": us, "gbps": n * k / us / 1e3, "error": float(error),
                    })  # fmt: skip
            show(shape, num_rows, n * k, found)
        del weights, plain
        torch.cuda.empty_cache()
    for way, reason in failed.items():
        print(f"FAILED {way}: {reason}")


def show(shape: str, num_rows: int, size: int, found: list[tuple[float, str, float]]) -> None:
    """The two best of each way."""
    seen: dict[str, int] = {}
    for us, name, error in sorted(found):
        way = name[:9]
        seen[way] = seen.get(way, 0) + 1
        if seen[way] <= 2:
            print(
                f"{shape:8} {num_rows:4} rows  {name:34} {us:8.1f} us {size / us / 1e3:6.0f} GB/s "
                f"off {error:.4f}",
                flush=True,
            )


def baselines(
    x: Tensor, weights: list[ScaledMatrix], plain: list[Tensor]
) -> list[tuple[str, float, int]]:
    """What the engine does now, and the same in bfloat16; name, microseconds, bytes."""
    size = weights[0].data.numel()
    named: dict[str, tuple[list[Callable[[], Any]], int]] = {}
    if len(x) <= gemm.MAX_ROWS:
        named["gemm.linear, FP8"] = ([lambda w=w: gemm.linear(x, w) for w in weights], size)
        named["gemm.linear, bf16"] = ([lambda w=w: gemm.linear(x, w) for w in plain], 2 * size)
    named["scaled_gemm, rounding too"] = (
        [lambda w=w: scaled_gemm.linear(x, w) for w in weights], size,
    )  # fmt: skip
    named["round_rows alone"] = ([lambda: in_fp8(x, Fp8Form(1, x.shape[1]))] * 8, x.numel() * 3)
    named["F.linear, bf16"] = (
        [lambda w=w: torch.nn.functional.linear(x, w) for w in plain], 2 * size,
    )  # fmt: skip
    found = []
    for name, (calls, num_bytes) in named.items():
        try:
            found.append((name, microseconds(calls), num_bytes))
        except Exception as error:
            print(f"FAILED {name}: {str(error).strip().split(chr(10))[0][:150]}")
    return found


TILES = [
    (64, 128, 4, 4), (128, 128, 3, 4), (128, 128, 3, 8), (128, 128, 4, 8), (128, 256, 3, 8),
    (256, 128, 3, 8), (128, 256, 4, 8),
]  # fmt: skip
"""BLOCK_M, BLOCK_N, stages and warps."""


def run_tiles(
    rounded: ScaledMatrix, weight: ScaledMatrix, tiling: tuple[int, int, int, int]
) -> Tensor:
    block_m, block_n, stages, warps = tiling
    num_rows, k_size = rounded.shape
    n_size = weight.shape[0]
    out = torch.empty(num_rows, n_size, dtype=torch.bfloat16, device="cuda")
    grid = (triton.cdiv(num_rows, block_m) * triton.cdiv(n_size, block_n),)
    scaled_gemm._tiles[grid](
        rounded.data, rounded.scales, weight.data, weight.scales, out, out, num_rows, n_size,
        k_size, *rounded.scales.stride(), *weight.scales.stride(),
        GROUP=0 if weight.has_row_scales else weight.group, HAS_BIAS=False, EVEN_K=True,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=128, BAND=8, num_warps=warps, num_stages=stages,
        **launch_options(out.device),
    )  # fmt: skip
    return out


def many_ways(x: Tensor, by_row: ScaledMatrix, by_block: ScaledMatrix) -> dict[str, Any]:
    rows = in_fp8(x, Fp8Form(1, x.shape[1])).rounded
    groups = in_fp8(x, Fp8Form(1, 128)).rounded
    plain = by_row.plain(torch.bfloat16)
    one = torch.ones((), device="cuda")
    scales = by_row.scales.view(1, -1)
    per_block = by_block.scales[::128].t()
    by_column = by_block.scales.t().contiguous().t()

    def library(a: ScaledMatrix, b: Tensor, scale_a: Tensor, scale_b: Tensor, fast: bool) -> Any:
        return lambda: torch._scaled_mm(
            a.data, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    found = {
        "bf16 library": lambda: torch.nn.functional.linear(x, plain),
        "library by row, fast sums": library(rows, by_row.data, rows.scales, scales, True),
        "library by row": library(rows, by_row.data, rows.scales, scales, False),
        "library by tensor, fast sums": library(rows, by_row.data, one, one, True),
        "library 1x128, 128x128": library(groups, by_block.data, groups.scales, per_block, False),
        "library 1x128, 128x128 turned": library(
            groups, by_block.data, groups.scales, per_block.contiguous(), False
        ),
        "library 1x128, 1x128": library(groups, by_block.data, groups.scales, by_column.t(), False),
        "round by row": lambda: in_fp8(x, Fp8Form(1, x.shape[1])),
        "round by group": lambda: in_fp8(x, Fp8Form(1, 128)),
    }
    for tiling in TILES:
        found[f"tiles by row {tiling}"] = lambda t=tiling: run_tiles(rows, by_row, t)
        found[f"tiles by group {tiling}"] = lambda t=tiling: run_tiles(groups, by_block, t)
    return found


def measure_many(results: list[dict[str, Any]]) -> None:
    for shape, (n, k) in SHAPES.items():
        if shape == "head":
            continue
        by_row = random_weight(n, k)
        scales = torch.rand(n // 128, k // 128, device="cuda", generator=seeded()) * 0.01
        scales = scales.repeat_interleave(128, 0)
        by_block = ScaledMatrix(by_row.data, scales, 128)
        for num_rows in MANY:
            x = random_rows(num_rows, k)
            exact = {False: scaled_gemm.linear(x, by_row).float()}
            exact[True] = run_tiles(in_fp8(x, Fp8Form(1, 128)).rounded, by_block, TILES[2]).float()
            for name, call in many_ways(x, by_row, by_block).items():
                try:
                    us = microseconds([call] * 4)
                    error = float("nan")
                    if "round" not in name:
                        right = exact["1x128" in name or "group" in name]
                        error = float((call().float() - right).norm() / right.norm())
                except Exception as reason:
                    first = str(reason).strip().split("\n")[0][:150]
                    print(f"{shape:8} {num_rows:5} rows  {name:36} FAILED {first}")
                    continue
                flops = 2 * n * k * num_rows / us / 1e6
                results.append({"shape": shape, "rows": num_rows, "way": name, "us": us})
                print(
                    f"{shape:8} {num_rows:5} rows  {name:36} {us:8.1f} us {flops:6.0f} TFLOPS, "
                    f"{error:.4f} from ours",
                    flush=True,
                )


def compile_all() -> None:
    mine = [sys.executable, "-m", "tests.gpu.scaled_times", "compile"]
    running = [
        subprocess.Popen([*mine, str(part), str(NUM_PROCESSES)]) for part in range(NUM_PROCESSES)
    ]
    for process in running:
        process.wait()


@torch.inference_mode()
def main(wanted: list[str]) -> None:
    if wanted == ["compile"]:
        compile_all()
        return
    if wanted[:1] == ["compile"]:
        compile_few(int(wanted[1]), int(wanted[2]))
        return
    results: dict[str, list[dict[str, Any]]] = {"few": [], "many": []}
    if not wanted or "few" in wanted:
        compile_all()
        measure_few(results["few"])
    if not wanted or "many" in wanted:
        measure_many(results["many"])
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "scaled_times.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
