"""The recurrent kernels of a CPU against their naive references, and those against transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as their_mamba
from transformers.models.qwen3_next import modeling_qwen3_next as their_delta

from manyroots.kernels.delta_rule import reference as delta_reference
from manyroots.kernels.delta_rule import torch_ops as delta_ops
from manyroots.kernels.gated_norm import reference as norm_reference
from manyroots.kernels.gated_norm import torch_ops as norm_ops
from manyroots.kernels.mamba import reference as mamba_reference
from manyroots.kernels.mamba import torch_ops as mamba_ops
from manyroots.kernels.recurrent.rows import StateRows
from manyroots.kernels.tolerances import assert_close
from tests.unit.kernels.recurrent_cases import (
    CountedOps,
    DeltaCase,
    Drawn,
    ScanCase,
    decodes,
    make_rows,
    mixed,
    prompts,
)

CPU = torch.device("cpu")
STEPS = [mixed, decodes, prompts]
DTYPES = [torch.float32, torch.bfloat16]


def assert_same(
    case: DeltaCase | ScanCase,
    rows: StateRows,
    dtype: torch.dtype,
    ours: Callable[..., Tensor],
    reference: Callable[..., Tensor],
) -> None:
    """What is given, what is kept, and what is left alone."""
    state, other = case.state.clone(), case.state.clone()
    got = ours(*case.inputs(), state, rows)
    assert got.dtype == dtype
    assert_close("recurrent", got, reference(*case.inputs(), other, rows), dtype)
    assert_close("recurrent", state, other, torch.float32)
    untouched = [unit for unit in range(len(state)) if unit not in rows.units.tolist()]
    assert torch.equal(state[untouched], case.state[untouched])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", STEPS)
def test_the_delta_rule_equals_the_reference_f06(
    step: Callable[[torch.device], StateRows], dtype: torch.dtype
) -> None:
    """F06: decodes and prompts in chunks share a step; states go on from what they were."""
    rows = step(CPU)
    case = DeltaCase.draw(int(rows.starts[-1]), Drawn(CPU, dtype))
    assert_same(case, rows, dtype, delta_ops.gated_delta, delta_reference.gated_delta)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", STEPS)
def test_the_delta_rule_by_channel_equals_the_reference_f06(
    step: Callable[[torch.device], StateRows], dtype: torch.dtype
) -> None:
    """F06: the same where each channel of a key decays by itself."""
    rows = step(CPU)
    case = DeltaCase.by_channel(int(rows.starts[-1]), Drawn(CPU, dtype))
    assert_same(case, rows, dtype, delta_ops.channel_delta, delta_reference.channel_delta)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", STEPS)
def test_the_scan_of_mamba_equals_the_reference_f06(
    step: Callable[[torch.device], StateRows], dtype: torch.dtype
) -> None:
    """F06: decodes and prompts in chunks share a step; states go on from what they were."""
    rows = step(CPU)
    case = ScanCase.draw(int(rows.starts[-1]), Drawn(CPU, dtype))
    assert_same(case, rows, dtype, mamba_ops.scan, mamba_reference.scan)
    case.least_step = 0.7
    assert_same(case, rows, dtype, mamba_ops.scan, mamba_reference.scan)


def test_keys_that_repeat_do_not_spoil_a_chunk() -> None:
    """Equal keys that nothing decays are the worst case of a chunk's triangular system: powers of
    it grow beyond float32 while its solution is plain."""
    rows = make_rows([128], [True], CPU)
    case = DeltaCase.draw(128, Drawn(CPU, torch.float32))
    case.k[:] = case.k[:1]
    case.beta[:], case.decay[:] = 20.0, -20.0
    assert_same(case, rows, torch.float32, delta_ops.gated_delta, delta_reference.gated_delta)


def test_the_references_are_what_transformers_computes() -> None:
    """Both of its ways: chunks, and one token at a time from a state."""
    rows = make_rows([70], [True], CPU)
    delta = DeltaCase.draw(70, Drawn(CPU, torch.float32))
    state = delta.state.clone()
    got = delta_reference.gated_delta(*delta.inputs(), state, rows)
    q, k = (x.repeat_interleave(2, dim=1)[None] for x in (delta.q, delta.k))
    v, decay, beta = delta.v.flatten(1, 2), delta.decay.flatten(1), delta.beta.flatten(1)
    g = -delta.a_log.exp() * F.softplus(decay + delta.dt_bias)
    for theirs in (
        their_delta.torch_chunk_gated_delta_rule,
        their_delta.torch_recurrent_gated_delta_rule,
    ):
        wanted, kept = theirs(
            q, k, v[None], g=g[None], beta=beta.sigmoid()[None],
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        assert_close("recurrent", got, wanted[0], torch.float32)
        assert_close("recurrent", state[rows.units], kept, torch.float32)
    scan = ScanCase.draw(70, Drawn(CPU, torch.float32))
    state = scan.state.clone()
    got = mamba_reference.scan(*scan.inputs(), state, rows)
    wanted, kept = their_mamba.mamba2_chunk_scan(
        scan.x[None], scan.dt[None], -scan.a_log.exp(), scan.b[None], scan.c[None], chunk_size=16,
        D=scan.d, dt_bias=scan.dt_bias, dt_softplus=True, return_final_states=True,
    )  # fmt: skip
    assert_close("recurrent", got, wanted[0], torch.float32)
    assert_close("recurrent", state[rows.units], kept, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_norms_equal_the_reference(gate_first: bool, dtype: torch.dtype) -> None:
    draw = Drawn(CPU, dtype)
    x, gate, weight = draw(5, 3, 24), draw(5, 3, 24), draw(3, 24)
    got = norm_ops.gated_norm(x, gate, weight, 1e-5, gate_first=gate_first)
    wanted = norm_reference.gated_norm(x, gate, weight, 1e-5, gate_first=gate_first)
    assert_close("norm", got, wanted, dtype)
    assert_close("norm", norm_ops.gated(x, gate), norm_reference.gated(x, gate), dtype)
    shared = gate[:, :, :1]
    got, wanted = norm_ops.sigmoid_gated(x, shared), norm_reference.sigmoid_gated(x, shared)
    assert_close("norm", got, wanted, dtype)


@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_prompts_are_computed_in_chunks_not_token_by_token_f06(kind: str) -> None:
    """F06: 2,000 tokens take a small part of the operators that as many single steps do."""
    num_tokens, draw = 2000, Drawn(CPU, torch.float32)
    drawn = DeltaCase.draw if kind == "delta" else ScanCase.draw
    compute = delta_ops.gated_delta if kind == "delta" else mamba_ops.scan
    case, one = drawn(num_tokens, draw), drawn(1, draw)
    with CountedOps() as whole:
        compute(*case.inputs(), case.state, make_rows([num_tokens], [True], CPU))
    with CountedOps() as single:
        compute(*one.inputs(), one.state, make_rows([1], [False], CPU))
    assert num_tokens * single.count >= 50 * whole.count
