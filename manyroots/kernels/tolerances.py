"""Tolerances between a computation and its reference: the only table, with a reason per row.

Every test that compares floating-point results takes its numbers from here. Loosening one is
therefore a visible change with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|actual - expected| <= atol + rtol * |expected|, elementwise."""

    atol: float
    rtol: float
    reason: str


TOLERANCES: dict[tuple[str, torch.dtype], Tolerance] = {
    ("attention", torch.float32): Tolerance(
        2e-5, 2e-5, "sums of up to a few thousand products in another order"
    ),
    ("attention", torch.bfloat16): Tolerance(
        1.6e-2, 1.6e-2, "8-bit mantissa: fused attention rounds the probabilities, too"
    ),
    ("attention", torch.float16): Tolerance(
        2e-3, 2e-3, "11-bit mantissa: fused attention rounds the probabilities, too"
    ),
    ("rotary", torch.float32): Tolerance(
        2e-5, 2e-5, "the angle is the product of a large position and a rounded frequency"
    ),
    ("rotary", torch.bfloat16): Tolerance(
        1.6e-2, 1.6e-2, "one rounding instead of the reference's two"
    ),
    ("norm", torch.float32): Tolerance(2e-6, 2e-6, "the mean in another order"),
    ("norm", torch.bfloat16): Tolerance(
        1.6e-2, 1.6e-2, "the reference rounds once more, before it scales"
    ),
    ("experts", torch.float32): Tolerance(
        2e-5, 2e-5, "sums of up to a few thousand products in another order"
    ),
    ("experts", torch.bfloat16): Tolerance(
        1.6e-2, 1.6e-2, "8-bit mantissa: each pair is rounded before and after it is weighted"
    ),
    ("recurrent", torch.float32): Tolerance(
        5e-5, 5e-5, "a chunk's tokens at once instead of one after the other, over all chunks"
    ),
    ("recurrent", torch.bfloat16): Tolerance(
        4e-2, 2e-2, "operands of the chunks' products are rounded to 8 bits, states are not"
    ),
    ("lora", torch.float32): Tolerance(2e-5, 2e-5, "products of a few hundred terms reordered"),
    ("lora", torch.bfloat16): Tolerance(
        4e-2, 1.6e-2, "operands and result rounded to 8 bits, with two products between"
    ),
    ("expert_lora", torch.float32): Tolerance(
        2e-5, 2e-5, "short sums in another order; what experts share is weighted before, not after"
    ),
    ("expert_lora", torch.bfloat16): Tolerance(
        4e-2, 1.6e-2, "what lies between the two products is rounded, and the reference's is not"
    ),
    ("clamped_experts", torch.float32): Tolerance(
        2e-5, 2e-5, "as other experts: float32 has bits enough for activations of 56"
    ),
    ("clamped_experts", torch.bfloat16): Tolerance(
        0.25,
        1.6e-2,
        "as other experts, whose adapters' first halves kernels round or not, times activations of "
        "up to 56 (gpt-oss), the last bit of which is a quarter",
    ),
    ("kept", torch.float8_e4m3fn): Tolerance(
        2.0**-9, 2.0**-3, "a number between two of FP8 may become either"
    ),
    ("kept_logits", torch.float32): Tolerance(
        0.0, 1e-2, "of what FP8 pages change: one of their numbers may become another (0.002 seen)"
    ),
    ("scaled", torch.float32): Tolerance(
        1e-2,
        1e-2,
        "FP8's matrix instructions keep sums to 14 bits; few rows are two numbers of FP8",
    ),
    ("scaled", torch.bfloat16): Tolerance(3e-2, 2e-2, "the same, and one rounding to 8 bits"),
    ("blocks_found", torch.float32): Tolerance(
        1e-6, 1e-6, "a group's scale is found from its span, which was rounded"
    ),
    ("blocks", torch.float32): Tolerance(
        2e-3, 2e-3, "a number between two of 8 bits may become either"
    ),
    ("fp8_experts", torch.float32): Tolerance(
        0.15,
        5e-2,
        "rows are rounded to FP8 between two products, and those between two numbers to either",
    ),
    ("fp8_experts", torch.bfloat16): Tolerance(0.15, 5e-2, "the same"),
    ("fp8_experts_mean", torch.float32): Tolerance(
        1e-2, 0.0, "the same for the root mean square of all errors, as a share of the numbers'"
    ),
    ("fp8_experts_mean", torch.bfloat16): Tolerance(
        1e-2, 0.0, "the same, and one rounding to 8 bits of each"
    ),
    ("self_check", torch.float32): Tolerance(
        2e-3, 0.0, "a whole model's log-probabilities, its prompt in other chunks and batches"
    ),
    ("self_check", torch.bfloat16): Tolerance(
        0.5, 0.0, "the same in 8-bit mantissas: layers round differently in other batches"
    ),
    ("self_check", torch.float16): Tolerance(0.1, 0.0, "the same in 11-bit mantissas"),
    ("logprobs", torch.float32): Tolerance(
        2e-5, 2e-6, "a sum over the vocabulary in another order, of exponentials rounded otherwise"
    ),
    ("weights", torch.float32): Tolerance(
        1.0, 4e-6, "whole numbers, of an exponent of up to 40 that is rounded to 24 bits"
    ),
    ("step", torch.float32): Tolerance(
        2e-5, 2e-5, "one kernel of a step, given the reference's inputs: sums in another order"
    ),
    ("step", torch.bfloat16): Tolerance(
        1e-2, 1e-2, "one kernel, the same inputs: one rounding of what it gives, one inside"
    ),
    ("router", torch.float32): Tolerance(
        3e-5,
        0.0,
        "a router's scores after other layers, in steps of 1 and of 80 tokens (2.7e-5 seen)",
    ),
    ("logits", torch.float32): Tolerance(
        1e-4, 1e-4, "attention and products in another order, over all layers"
    ),
    ("logits", torch.bfloat16): Tolerance(
        6e-2, 6e-2, "a rounding of 2^-8 per operation, over all layers"
    ),
    ("worst", torch.bfloat16): Tolerance(
        1e-2, 0.5, "largest error of a whole model against float32, beside another implementation's"
    ),
    ("rounding", torch.bfloat16): Tolerance(
        5e-3, 0.25, "mean error of a whole model against float32, beside another implementation's"
    ),
}


def assert_close(op: str, actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Raise AssertionError with the worst element if `op` in `dtype` exceeds its tolerance."""
    row = TOLERANCES[op, dtype]
    torch.testing.assert_close(
        actual.float(), expected.float(), atol=row.atol, rtol=row.rtol, equal_nan=False
    )
