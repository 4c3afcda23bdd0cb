"""Q02: a GPU's own instructions for MXFP4, which the interpreter leaves out, carried out here."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: the GPU kernels are NOT tested")

from manyroots.kernels.fused_moe import triton_fp4
from manyroots.kernels.mxfp4 import LARGEST_EXPONENT, LEAST_EXPONENT, Mxfp4Matrix

Registers = dict[str, np.ndarray]
_32_BITS = np.uint64(0xFFFFFFFF)


def instructions(of: str) -> str:
    """What a function of device code has between its quotes."""
    with open(triton_fp4.__file__) as file:
        source = file.read().split(f"def {of}(")[1]
    [text] = re.findall(r'inline_asm_elementwise\(\s+"""\{?(.*?)\}?"""', source, re.DOTALL)[:1]
    return text


def carry_out(text: str, registers: Registers) -> None:
    """One after the other; as many numbers at once as registers hold."""
    for line in filter(None, (part.strip() for part in text.split(";"))):
        name, _, rest = line.partition(" ")
        to, *operands = [word.strip() for word in rest.split(",")]
        if name == ".reg":
            continue
        given = [
            registers[word].astype(np.uint64) if word in registers else np.uint64(int(word, 0))
            for word in operands
        ]
        registers[to] = (OPERATIONS[name](*given) & _32_BITS).astype(np.uint32)


def _prmt(a: np.ndarray, b: np.ndarray, choice: np.uint64) -> np.ndarray:
    both, found = a | b << np.uint64(32), np.zeros_like(a)
    for byte in range(4):
        which = int(choice) >> 4 * byte & 15
        found |= (both >> np.uint64(8 * which) & np.uint64(255)) << np.uint64(8 * byte)
    return found


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.uint64) -> np.ndarray:
    assert table == 0xEA
    return a & b | c


def _halves(pairs: np.ndarray) -> torch.Tensor:
    """bfloat16 [.., 2]"""
    bits = np.stack((pairs, pairs >> np.uint64(16)), -1).astype(np.uint16)
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _mul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    product = (_halves(a).double() * _halves(b).double()).to(torch.bfloat16)
    bits = product.contiguous().view(torch.int16).numpy().view(np.uint16).astype(np.uint64)
    return bits[..., 0] | bits[..., 1] << np.uint64(16)


OPERATIONS = {
    "prmt.b32": _prmt,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": _lop3,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mul.rn.bf16x2": _mul,
}


def test_q02_instructions_give_every_number_and_every_power_exactly() -> None:
    """Q02: 2^26 times too small, which is what `whole_sums` makes good."""
    rows, draw = 400, torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (rows, 64), generator=draw, dtype=torch.uint8)
    powers = torch.randint(
        LEAST_EXPONENT, LARGEST_EXPONENT + 1, (rows, 4), generator=draw, dtype=torch.uint8
    )
    matrix = Mxfp4Matrix.empty(rows, 128, device=torch.device("cpu"))
    matrix.take(blocks, powers)
    words = matrix.words.numpy().view(np.uint32)
    of_groups = {"$4": matrix.exponents.view(torch.int32).numpy().view(np.uint32)[:, 0]}
    carry_out(instructions("_powers"), of_groups)
    found = torch.empty(rows, 8, 16, dtype=torch.float64)
    for first in range(0, 16, 2):
        registers = {"$8": words[:, first], "$9": words[:, first + 1]}
        for group in range(4):
            registers[f"${10 + 2 * group}"] = of_groups[f"${group}"]
        carry_out(instructions("_bfloat16_numbers"), registers)
        for number in range(8):
            pair = _halves(registers[f"${number}"].astype(np.uint64))
            found[:, number, first : first + 2] = pair.double()
    assert torch.equal(found.flatten(1) * 2**26, matrix.plain(torch.float32).double())
