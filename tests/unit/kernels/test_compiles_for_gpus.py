"""Q01, Q02, Q04: kernels of FP8, of MXFP4 and in Gluon are compiled for a Hopper GPU, which need
not be there. The interpreter takes what a compiler does not, such as one name for two kinds of
pointers, and takes nothing in Gluon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
Ended = tuple[dict[str, int], str]
"""Exit codes by script, and what was said on stderr."""
pytest.importorskip("triton", reason="triton is not installed: the GPU kernels are NOT tested")

SCRIPT = '''
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from manyroots.kernels import triton_fp8_rows
from manyroots.kernels.activation import triton as activation
from manyroots.kernels.delta_rule import triton_channels as channels
from manyroots.kernels.gemm import triton as gemm
from manyroots.kernels.fused_moe import triton as routing
from manyroots.kernels.fused_moe import triton_products as moe
from manyroots.kernels.qk_rope_kv_write import triton as rope

FP8, HALF, FLOAT, LONG, INT = "*fp8e4nv", "*bf16", "*fp32", "*i64", "*i32"


def compiled(kernel, types, **constants):
    """Machine code for compute capability 9.0; arguments without a type are whole numbers."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name in ("k_size", "n_size", "hidden_size")
    }
    source = ASTSource(kernel, signature, constexprs=places, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


rows = dict(x=HALF, data=FP8, scales=FLOAT)
code = compiled(
    triton_fp8_rows._in_fp8, rows, PARTS=2, GROUPS=1, COLUMNS=512, RUN=0, DEPENDENT=True
)
assert "e4m3x2" in code

gates = dict(gate_up=HALF, out=HALF, data=FP8, scales=FLOAT, part_stride="i64", gate_factor="fp32")
code = compiled(
    activation._gated_row, gates, KIND="silu", NUM_SPLITS=1, HAS_OUT=False, PARTS=1, RUN=8,
    PIECES=3, BLOCK=1024, DEPENDENT=True,
)
# Exponentials and quotients by the chip's own approximations, and bfloat16 two at a time.
assert "ex2.approx.ftz" in code and "rcp.approx.ftz" in code and "cvt.rn.bf16x2" in code

gates |= dict(hidden=HALF, pool=HALF, table=LONG, slots=INT, blocks=INT, num_blocks=INT)
for hidden_splits in (0, 1):
    code = compiled(
        activation._gated, gates, KIND="silu", NUM_SPLITS=1, HIDDEN_SPLITS=hidden_splits,
        HAS_OUT=True, PARTS=0, GROUP=128, BLOCK_R=16, BLOCK_N=128, AHEAD=True, SINGLE_ROWS=2,
        RANK_BLOCK=16, MAX_RANK=16, DEPENDENT=True,
    )
    # With and without adapters: rows of the base model must not depend on their neighbours.
    assert "rcp.approx.ftz" in code and "div.full" not in code

pages = dict.fromkeys(rope._qk_rope_kv_write.arg_names[:14], HALF)
pages |= dict(cos=FLOAT, sin=FLOAT, layer_kv=FP8, pages=LONG, offsets=LONG, eps="fp32")
compiled(
    rope._qk_rope_kv_write, pages, NUM_HEADS=4, NUM_KV=2, HALF=16, PAIRS=16, HAS_NORM=False,
    NUM_SPLITS=1, HIDDEN_SPLITS=0, BLOCK_R=4, AHEAD=False, SINGLE_ROWS=1, RANK_BLOCK=16,
    MAX_RANK=16, DEPENDENT=True,
)

product = dict.fromkeys(("x", "bias", "pool", "table", "scalings", "blocks", "num_blocks"), HALF)
product |= dict.fromkeys(("x_scales", "w_scales", "squares", "out", "hidden"), FLOAT)
product |= dict(parts=FP8, w=FP8, eps="fp32")
code = compiled(
    gemm._linear, product, SCALED=1, GROUP=0, PRECISE=True, HAS_BIAS=False, NUM_PARTS=0, PIECES=0,
    BLOCK_M=8, BLOCK_N=64, BLOCK_K=128, EVEN_K=True, LINES=1, DEPENDENT=True,
)
assert "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3" in code

scores = dict.fromkeys(("logits", "bias", "weights", "hidden", "pool"), FLOAT)
scores |= dict.fromkeys(("chosen", "ranks", "pairs", "groups", "slots", "counter"), INT)
scores |= dict(table=LONG, given=LONG, factor="fp32")
for scoring, is_given in (("softmax", False), ("sigmoid_renormalised", False), ("sigmoid", True)):
    compiled(
        routing._route, scores, NUM_SPLITS=1, LORA_SPLITS=0, RANK_BLOCK=16, TOP_K=3,
        SCORING=scoring, HAS_BIAS=True, BLOCK_C=4, BLOCK_E=16, BLOCK_R=8, BLOCK_T=16,
        NUM_GROUPS=4, CHOSEN_GROUPS=2, GROUP_SIZE=3, IS_GIVEN=is_given, DEPENDENT=True,
    )

states = dict.fromkeys(("q", "k", "v", "decay", "beta", "out"), HALF)
states |= dict.fromkeys(("a_log", "dt_bias", "state"), FLOAT)
states |= dict(units=LONG, starts=INT, is_fresh="*i1")
compiled(
    channels._tokens, states, HEADS=32, KEY_DIM=128, VALUE_DIM=128, BLOCK_V=32, EPS=1e-6,
    DEPENDENT=True,
)

experts = dict.fromkeys(("x", "up_bias", "down_bias", "inner"), HALF)
experts |= dict.fromkeys(("shared_up", "shared_down", "shared_inner"), HALF)
experts |= dict.fromkeys(("gate_up", "up_scales", "down", "down_scales"), INT)
experts |= dict.fromkeys(("pairs", "groups", "done"), INT) | dict(weights=FLOAT, out=FLOAT)
sizes = dict(
    EVEN_UP=False, EVEN_DOWN=False, TOP_K=4, UP_TILES=45, DOWN_TILES=45, BLOCK_M=16, UP_N=64,
    UP_K=128, DOWN_N=64, DOWN_K=128, EVEN_SHARED=True, GROUPS_POW=64, COLUMNS=512, DEPENDENT=True,
)
code = compiled(
    moe.both_products, experts, UP_SCALED=-4, DOWN_SCALED=-4, KIND="clamped_swiglu",
    HAS_UP_BIAS=True, HAS_DOWN_BIAS=True, SHARED_TILES=0, HAS_ADAPTERS=False, **sizes,
)
assert "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16" in code
# A product's tile as the first operand, made in registers: 8 words a thread are 32 of two numbers.
assert code.count("mul.rn.bf16x2") == 3 * 32

experts |= dict.fromkeys(("gate_up", "down", "pool"), HALF) | dict(slots=INT, experts=INT)
experts |= {n: LONG for n in moe.both_products.arg_names if n.endswith("_table")}
experts |= {n: FLOAT for n in moe.both_products.arg_names if n.endswith(("_scalings", "_delta"))}
code = compiled(
    moe.both_products, experts, UP_SCALED=0, DOWN_SCALED=0, KIND="silu", HAS_UP_BIAS=False,
    HAS_DOWN_BIAS=False, SHARED_TILES=44, HAS_ADAPTERS=True, **sizes,
)
assert "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16" in code
'''


ON_HOPPER = """
import re

import torch

from tests.gpu.hopper import compile_for_hopper

compile_for_hopper()
"""
IN_GLUON = f"""{ON_HOPPER}
from manyroots.kernels.gemm import triton_hopper as gemm

rows = torch.zeros(8, 64, dtype=torch.bfloat16)
code = gemm._linear.warmup(
    gemm._describe(rows, 16, 64), gemm._describe(rows, 64, 64), rows, rows, 8, 8, 1, 2, 1,
    BLOCK_M=16, BLOCK_K=64, PIECES=2, PIECE=64, STAGES=3, WAVES=1, HAS_BIAS=True, DEPENDENT=True,
    launch_pdl=True, num_warps=4, maxnreg=64, grid=(1,),
).asm["ptx"]
steps = re.findall("cp.async.bulk|griddepcontrol.wait", code)
first = steps.index("cp.async.bulk")
# A tile's two pieces, and not its rows.
assert steps[first : first + 3] == ["cp.async.bulk", "cp.async.bulk", "griddepcontrol.wait"], steps
assert "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16" in code
"""


EARLY = f"""{ON_HOPPER}
from manyroots.kernels.gemm import triton_early as early

rows, sums = torch.zeros(8, 256, dtype=torch.bfloat16), torch.zeros(8)
weight = torch.zeros(64, 256, dtype=torch.float8_e4m3fn)
constants = dict(PRECISE=True, BLOCK_M=8, BLOCK_N=64, BLOCK_K=128, STAGES=2, PLACES=2, WARPS=4)
for is_rounded in (True, False):
    data = torch.zeros(2, 8, 256, dtype=torch.float8_e4m3fn) if is_rounded else weight
    code = early._linear.warmup(
        *early._descriptors(data, weight, 8, 8, 64), rows, sums, sums, sums, 8, 64, 256, 2,
        ROUNDED=is_rounded, GROUP=128 if is_rounded else 0, DEPENDENT=True, launch_pdl=True,
        num_warps=4, grid=(1,), **constants,
    ).asm["ptx"]
    steps = " ".join(re.findall("cp.async.bulk|griddepcontrol.wait", code))
    assert steps.startswith("cp.async.bulk cp.async.bulk griddepcontrol.wait"), steps
    assert "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3" in code
"""


LATENTS = f"""{ON_HOPPER}
from unittest import mock

from triton.runtime.jit import JITFunction

from manyroots.kernels.latent import triton_hopper as decode
from manyroots.kernels.latent import triton_hopper_prompt as prompt
from manyroots.kernels.latent.inputs import KeyPiece, SplitKeys

run, made = JITFunction.run, {{}}


def launched(kernel, *args, grid, **options):
    options["warmup"] = True
    made[kernel.fn.__name__] = run(kernel, *args, grid=grid, **options).asm["ptx"]


half, int32 = torch.bfloat16, torch.zeros(4, 4, dtype=torch.int32)
with (
    mock.patch.object(JITFunction, "run", launched),
    mock.patch.object(decode, "_num_multiprocessors", lambda device: 132),
    mock.patch.object(prompt, "_num_multiprocessors", lambda device: 132),
    mock.patch.object(prompt, "is_hopper", lambda device: True),
):
    for way, name, shapes in (
        (decode.DecodeWay(16), "_decode", ("n16",)),
        (decode.DecodeWay(64), "_decode", ("n32", "n128")),
        (decode.DecodeWay(64, in_pairs=True), "decode_pairs", ("n64", "n256")),
    ):
        queries = torch.zeros(4, way.heads, 576, dtype=half)
        pages = torch.zeros(3, 16, 576, dtype=half)
        decode.latent_decode(queries, pages, int32, int32[0], 0.1, 512, way)
        found = set(re.findall("wgmma.mma_async.sync.aligned.m64(n[0-9]*)k16", made[name]))
        assert found == set(shapes), found
    for key, value, shapes in ((192, 128, ("n128",)), (256, 256, ("n64", "n256"))):
        q = torch.zeros(300, 2, key, dtype=half)
        piece = KeyPiece(int32[0], int32[0], int32[0, :3], 300)
        both = torch.zeros(300, 2, key - 64 + value, dtype=half)
        keys = SplitKeys(both[..., : key - 64], both[:, 0, :64].contiguous())
        assert prompt.is_for(q, keys, both[..., key - 64 :], piece)
        prompt.attend_piece(q, keys, both[..., key - 64 :], piece, 0.1)
        found = set(re.findall("wgmma.mma_async.sync.aligned.m64(n[0-9]*)k16", made["_prompt"]))
        assert found == set(shapes), found
"""


SCRIPTS = {"fp8": SCRIPT, "gluon": IN_GLUON, "early": EARLY, "latents": LATENTS}
IN_FORKS = """
import json, os, sys, traceback

import torch
import triton

for name, script in json.load(sys.stdin).items():
    if not os.fork():
        failed = 1
        try:
            exec(script, {})
            failed = 0
        except BaseException:
            print(name, traceback.format_exc(), file=sys.stderr)
        finally:
            os._exit(failed)
    print(json.dumps([name, os.waitstatus_to_exitcode(os.wait()[1])]), flush=True)
"""
"""Each script in a process of its own, which has imported what takes longest."""


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest) -> Ended:
    """Of the scripts that tests of this run ask for."""
    items = (item for item in request.session.items if item.path == request.path)
    wanted = {item.callspec.params["script"] for item in items}  # type: ignore[attr-defined]
    quiet = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", IN_FORKS],
        env=quiet,
        input=json.dumps({name: SCRIPTS[name] for name in sorted(wanted)}),
        capture_output=True,
        text=True,
        timeout=1100,
        cwd=ROOT,
    )
    return dict(map(json.loads, found.stdout.splitlines())), found.stderr[-6000:]


@pytest.mark.parametrize("script", SCRIPTS)
def test_q01_q04_f07_kernels_compile_for_hopper(ended: Ended, script: str) -> None:
    """Q01, Q02, Q04, F07: FP8's product is one of its matrix instructions, both numbers in one, and
    that of MXFP4 is one of bfloat16's. Products in Gluon ask for weights before they wait for the
    kernel before them, early ones for as many as they have room for. Latent decode has heads or
    tokens as the rows of matrix instructions, whichever are enough; pairs of tiles have whole tiles
    of scores and half of the values."""
    codes, said = ended
    assert codes.get(script) == 0, said
