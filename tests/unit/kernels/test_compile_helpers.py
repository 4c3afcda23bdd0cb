"""Helper processes compile kernels into Triton's cache, under the hashes of this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("triton", reason="triton is not installed: the GPU kernels are NOT tested")

from manyroots.kernels.compile_helpers import _CannotSendError, _name_of, _plain, _restored

ROOT = Path(__file__).parents[3]

SCRIPT = """
import os
import signal
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from manyroots.kernels import compile_helpers, triton_fp8_rows
from manyroots.kernels.activation import triton as activation


def source(block):
    kernel = activation._gated_row
    constants = dict(
        KIND="silu", NUM_SPLITS=1, HAS_OUT=False, PARTS=1, RUN=8, PIECES=3, BLOCK=block,
        DEPENDENT=True,
    )
    types = dict(gate_up="*bf16", out="*bf16", data="*fp8e4nv", scales="*fp32", gate_factor="fp32")
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i64") for n in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in types}
    return ASTSource(kernel, signature, constexprs=places, attrs=aligned)


def compiled(block):
    return helpers.compile(source(block), target=GPUTarget("cuda", 90, 32), options={}).asm["cubin"]


hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
compile_helpers.num_at_once = lambda: 2
compile_helpers.FEW_KERNELS = 1
triton_fp8_rows.scale_of.cache_key  # An earlier launch called it, unlike in the helper.
compile_helpers.fix_hash(activation._gated_row)
helpers = compile_helpers.CompileHelpers()

assert compiled(256)
assert hits == [False], "helpers start only once several kernels are missing"
for block in (512, 256):
    assert compiled(block)
    assert hits.pop(), "it is in the cache"
assert helpers.num_compiled == 1

processes = helpers._processes
answer, processes.call = processes.call, lambda _: [b"ValueError: no"]
assert compiled(128)
assert not hits.pop(), "this process compiled it"
processes.call = answer
for fork in Path(f"/proc/{(pid := processes.pid)}/task/{pid}/children").read_text().split():
    os.kill(int(fork), signal.SIGKILL)
for block in (64, 2048, 4096):
    assert compiled(block)
    assert not hits.pop(), "helpers that died are of no use"
helpers.close()
helpers.begin()
assert helpers._processes is None, "the cache is not empty"

triton.knobs.cache.dir += "/new"
helpers.begin()
assert compiled(1024)
assert hits.pop(), "they were started before a kernel was missing"
assert helpers.num_compiled == 2
helpers.close()
"""


def test_s04_helpers_compile_what_this_process_then_finds_in_the_cache(tmp_path: Path) -> None:
    """S04: with the same hash, although both processes hashed functions in another order. A kernel
    that a helper can't compile is compiled here."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr[-4000:]


class Asked(NamedTuple):
    """Like the arguments of a kernel that takes several tensors as one."""

    logits: str
    stride: str


def test_a_source_is_sent_as_json() -> None:
    value = {(0, 1): [["tt.divisibility", 16]], "asked": Asked("*bf16", "i32"), "none": None}
    assert _restored(json.loads(json.dumps(_plain(value)))) == value


@pytest.mark.parametrize("value", [object(), {"layout": {1, 2}}, b"bytes"])
def test_what_json_cannot_represent_is_not_sent(value: object) -> None:
    with pytest.raises(_CannotSendError, match="can't be sent"):
        _plain(value)


def test_a_kernel_is_sent_by_a_name_under_which_a_helper_finds_it() -> None:
    assert _name_of(Asked, Asked) == [__name__, "Asked"]
    with pytest.raises(_CannotSendError, match="not what its module has"):
        _name_of(object(), Asked)
