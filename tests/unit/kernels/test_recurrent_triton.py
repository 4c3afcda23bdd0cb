"""The recurrent kernels in Triton against their naive references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.unit.kernels.recurrent_cases import (
    NUM_UNITS,
    DeltaCase,
    Drawn,
    ScanCase,
    decodes,
    make_rows,
    short,
)
from tests.unit.kernels.triton_cases import DEVICE, DTYPES

from manyroots.kernels.causal_conv import reference as conv_reference  # isort: skip
from manyroots.kernels.causal_conv import triton as conv  # isort: skip
from manyroots.kernels.delta_rule import reference as delta_reference  # isort: skip
from manyroots.kernels.delta_rule import triton as delta  # isort: skip
from manyroots.kernels.gated_norm import reference as norm_reference  # isort: skip
from manyroots.kernels.gated_norm import triton as norm  # isort: skip
from manyroots.kernels.mamba import reference as mamba_reference  # isort: skip
from manyroots.kernels.mamba import triton as mamba  # isort: skip
from manyroots.kernels.recurrent.rows import StateRows  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip

STEPS = [short, decodes]
Step = Callable[[torch.device], StateRows]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("is_plain", "width"), [(True, 3), (False, 4)])
def test_the_convolution_equals_the_reference(
    is_plain: bool, width: int, step: Step, dtype: torch.dtype
) -> None:
    rows = step(DEVICE)
    draw = Drawn(DEVICE, dtype)
    x = draw(int(rows.starts[-1]), 150)[:, 10:140]
    weight, bias = draw(130, width), None if is_plain else draw(130)
    activation = None if is_plain else "silu"
    state = draw(NUM_UNITS, 140, width - 1)[:, :130]
    other = state.clone()
    got = conv.conv(x, weight, bias, state, rows, activation)
    wanted = conv_reference.conv(x, weight, bias, other, rows, activation)
    assert_close("recurrent", got, wanted, dtype)
    assert torch.equal(state, other)


def test_channels_in_groups_of_a_wider_product_are_convolved_in_place() -> None:
    rows = short(DEVICE)
    draw = Drawn(DEVICE, torch.float32)
    x = draw(int(rows.starts[-1]), 3, 70)[:, :, :50]
    weight, state = draw(150, 4), draw(NUM_UNITS, 150, 3)
    other = state.clone()
    got = conv.conv(x, weight, None, state, rows, "silu")
    wanted = conv_reference.conv(x, weight, None, other, rows, "silu")
    assert_close("recurrent", got, wanted, torch.float32)
    assert torch.equal(state, other)


@pytest.mark.parametrize("step", STEPS)
def test_heads_that_lie_with_their_key_head_are_read_in_place(step: Step) -> None:
    """As Qwen3-Next's product has them."""
    rows, groups, each, dim = step(DEVICE), 2, 2, 16
    draw = Drawn(DEVICE, torch.float32)
    num_tokens = int(rows.starts[-1])
    case = DeltaCase.draw(num_tokens, draw, groups=groups, each=each, key=dim, value=dim)
    sizes = [dim, dim, each * dim]
    case.q, case.k, v = draw(num_tokens, groups, sum(sizes) + 7).split([*sizes, 7], dim=2)[:3]
    case.v = v.unflatten(2, (each, dim))
    case.beta, case.decay = draw(num_tokens, groups, 2 * each).chunk(2, dim=2)
    state, other = case.state.clone(), case.state.clone()
    got = delta.gated_delta(*case.inputs(), state, rows)
    wanted = delta_reference.gated_delta(*case.inputs(), other, rows)
    assert_close("recurrent", got, wanted, torch.float32)
    assert_close("recurrent", state, other, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", STEPS)
def test_the_delta_rule_equals_the_reference(step: Step, dtype: torch.dtype) -> None:
    rows = step(DEVICE)
    case = DeltaCase.draw(int(rows.starts[-1]), Drawn(DEVICE, dtype), value=64)
    state, other = case.state.clone(), case.state.clone()
    got = delta.gated_delta(*case.inputs(), state, rows)
    wanted = delta_reference.gated_delta(*case.inputs(), other, rows)
    assert_close("recurrent", got, wanted, dtype)
    assert_close("recurrent", state, other, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", STEPS)
def test_the_delta_rule_by_channel_equals_the_reference(step: Step, dtype: torch.dtype) -> None:
    rows = step(DEVICE)
    case = DeltaCase.by_channel(int(rows.starts[-1]), Drawn(DEVICE, dtype), value=64)
    state, other = case.state.clone(), case.state.clone()
    got = delta.channel_delta(*case.inputs(), state, rows)
    wanted = delta_reference.channel_delta(*case.inputs(), other, rows)
    assert_close("recurrent", got, wanted, dtype)
    assert_close("recurrent", state, other, dtype)


def test_keys_that_repeat_do_not_spoil_a_chunk() -> None:
    rows = make_rows([70], [True], DEVICE)
    case = DeltaCase.draw(70, Drawn(DEVICE, torch.float32))
    case.k[:] = case.k[:1]
    case.beta[:], case.decay[:] = 20.0, -20.0
    state, other = case.state.clone(), case.state.clone()
    got = delta.gated_delta(*case.inputs(), state, rows)
    wanted = delta_reference.gated_delta(*case.inputs(), other, rows)
    assert_close("recurrent", got, wanted, torch.float32)
    assert_close("recurrent", state, other, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("least_step", [0.0, 0.7])
@pytest.mark.parametrize("step", STEPS)
def test_the_scan_of_mamba_equals_the_reference(
    step: Step, least_step: float, dtype: torch.dtype
) -> None:
    rows = step(DEVICE)
    case = ScanCase.draw(int(rows.starts[-1]), Drawn(DEVICE, dtype), dim=64)
    case.least_step = least_step
    state, other = case.state.clone(), case.state.clone()
    got = mamba.scan(*case.inputs(), state, rows)
    wanted = mamba_reference.scan(*case.inputs(), other, rows)
    assert_close("recurrent", got, wanted, dtype)
    assert_close("recurrent", state, other, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_and_their_norms_equal_the_reference(dtype: torch.dtype) -> None:
    draw = Drawn(DEVICE, dtype)
    x, gate = draw(5, 3, 2, 24)[:, :, 0], draw(5, 3, 2, 24)[:, :, 1]
    for weight in (draw(24), draw(3, 24)):
        for gate_first in (False, True):
            got = norm.gated_norm(x, gate, weight, 1e-5, gate_first=gate_first)
            wanted = norm_reference.gated_norm(x, gate, weight, 1e-5, gate_first=gate_first)
            assert_close("norm", got, wanted, dtype)
    by_two = draw(70, 3, 50)[:, :, :48].unflatten(2, (2, 24))
    many, weight = draw(70, 6, 24), draw(24)
    got = norm.gated_norm(many, by_two, weight, 1e-5, gate_first=False)
    wanted = norm_reference.gated_norm(many, by_two, weight, 1e-5, gate_first=False)
    assert_close("norm", got, wanted, dtype)
    assert_close("norm", norm.gated(x, gate), norm_reference.gated(x, gate), dtype)
    wide, one = draw(5, 1500), draw(5, 1)
    got, wanted = norm.sigmoid_gated(wide, one), norm_reference.sigmoid_gated(wide, one)
    assert_close("norm", got, wanted, dtype)
    got, wanted = norm.sigmoid_gated(x, gate), norm_reference.sigmoid_gated(x, gate)
    assert_close("norm", got, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_gate_lets_through_is_added_to_the_experts(dtype: torch.dtype) -> None:
    draw = Drawn(DEVICE, dtype)
    by_token = draw(5, 3, 1030, dtype=torch.float32)
    x, weight = draw(5, 40), draw(40) * 40**-0.5
    for shared in (draw(5, 1030), draw(2, 5, 1030, dtype=torch.float32)):
        for sums in (by_token.transpose(0, 1), by_token[:, 0].contiguous()):
            got = norm.add_gated(sums, shared, x, weight)
            wanted = norm_reference.add_gated(sums, shared, x, weight)
            assert_close("norm", got, wanted, dtype)
