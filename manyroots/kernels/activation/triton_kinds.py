"""The kinds of gated activation inside Triton kernels, chosen when a kernel is compiled."""

from __future__ import annotations

import triton
import triton.language as tl

from manyroots.kernels.activation.kinds import CLAMP_ALPHA, CLAMP_LIMIT, Activation

_SILU = tl.constexpr(Activation.SILU.value)
_GELU = tl.constexpr(Activation.GELU.value)
_GELU_TANH = tl.constexpr(Activation.GELU_TANH.value)
_RELU = tl.constexpr(Activation.RELU.value)
_ALPHA = tl.constexpr(CLAMP_ALPHA)
_LIMIT = tl.constexpr(CLAMP_LIMIT)


@triton.jit
def activated(gate, up, KIND: tl.constexpr):
    """Of float32 blocks of one shape; KIND is the value of an `Activation`."""
    if KIND == _SILU:
        value = gate * tl.sigmoid(gate) * up
    elif KIND == _GELU:
        value = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif KIND == _GELU_TANH:
        # 0.5 * (1 + tanh(x)) is sigmoid(2 x).
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        value = gate * tl.sigmoid(inner) * up
    elif KIND == _RELU:
        value = tl.maximum(gate, 0.0) * up
    else:
        gate = tl.minimum(gate, _LIMIT)
        up = tl.minimum(tl.maximum(up, -_LIMIT), _LIMIT)
        value = (up + 1.0) * gate * tl.sigmoid(gate * _ALPHA)
    return value
