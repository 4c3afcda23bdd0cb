"""The kinds of gated activation inside Triton kernels, chosen when a kernel is compiled."""

from __future__ import annotations

import triton
import triton.language as tl

from manyroots.kernels.activation.kinds import CLAMP_ALPHA, CLAMP_LIMIT, CLIP_LIMIT, Activation

_SILU = tl.constexpr(Activation.SILU.value)
_GELU = tl.constexpr(Activation.GELU.value)
_GELU_TANH = tl.constexpr(Activation.GELU_TANH.value)
_RELU = tl.constexpr(Activation.RELU.value)
_CLIPPED = tl.constexpr(Activation.CLIPPED_SILU.value)
_CLIP = tl.constexpr(CLIP_LIMIT)
_ALPHA = tl.constexpr(CLAMP_ALPHA)
_LIMIT = tl.constexpr(CLAMP_LIMIT)


@triton.jit
def _fast_silu(gate):
    """Uses the chip's approximate instructions. The usual code corrects them at the ends of the
    range. They differ in the last two bits, which a 16-bit result does not hold."""
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 e;
        mul.f32 e, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 e, e;
        add.f32 e, e, 0f3F800000;
        rcp.approx.ftz.f32 e, e;
        mul.f32 $0, $1, e;
        }""",
        "=f,f", [gate], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def fast_bfloat16(values):
    """Round float32 numbers to bfloat16 and return them in float32, two at a time. One at a time
    they would compete for the few units that compute exponentials."""
    bits = tl.inline_asm_elementwise(
        """{
        .reg .b32 both;
        .reg .f32 low, high;
        mov.b32 low, $2;
        mov.b32 high, $3;
        cvt.rn.bf16x2.f32 both, high, low;
        shl.b32 $0, both, 16;
        and.b32 $1, both, 0xffff0000;
        }""",
        "=r,=r,r,r", [values.to(tl.int32, bitcast=True)], dtype=tl.int32, is_pure=True, pack=2,
    )  # fmt: skip
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def activated(gate, up, KIND: tl.constexpr, FAST: tl.constexpr = False):
    """Takes float32 blocks of one shape; KIND is the value of an `Activation`. FAST: for Hopper
    GPUs, with the precision of a 16-bit result."""
    if KIND == _SILU and FAST:
        value = _fast_silu(gate) * up
    elif KIND == _SILU:
        value = gate * tl.sigmoid(gate) * up
    elif KIND == _GELU:
        value = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif KIND == _GELU_TANH:
        # 0.5 * (1 + tanh(x)) is sigmoid(2 x).
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        value = gate * tl.sigmoid(inner) * up
    elif KIND == _RELU:
        value = tl.maximum(gate, 0.0) * up
    elif KIND == _CLIPPED:
        gate = tl.minimum(gate, _CLIP)
        value = gate * tl.sigmoid(gate) * tl.minimum(tl.maximum(up, -_CLIP), _CLIP)
    else:
        gate = tl.minimum(gate, _LIMIT)
        up = tl.minimum(tl.maximum(up, -_LIMIT), _LIMIT)
        value = (up + 1.0) * gate * tl.sigmoid(gate * _ALPHA)
    return value
