"""The comparison with the CPU finds faults in the GPU's path, and nothing where there are none.

Where there is no GPU, too: the GPU's runner computes with the references of its kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from manyroots.kernels import choice, fp8_rows
from manyroots.kernels.choice import Kernels
from manyroots.kernels.fp8_rows import Fp8Form, Fp8Rows
from manyroots.kernels.scaled import ScaledMatrix, quantize_rows
from tests.gpu.checked import RESULTS, Record, checked_kernels
from tests.gpu.engines import Side
from tests.gpu.faults import BENT_ALONE, FAULTS, BentKernels, batches, verdict
from tests.gpu.parity import Parity

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_steps")]
COUNT = 5
"""Requests of a batch."""
OF_EXPERTS = "fused_moe"
HYBRIDS = {
    "qwen3-next": (
        "causal_conv.conv",
        "delta_rule.gated_delta",
        "gated_norm.gated_norm",
        "gated_norm.sigmoid_gated",
        "gated_norm.add_gated",
    ),
    "kimi-linear": ("delta_rule.channel_delta",),
    "granite-h": ("mamba.scan",),
    "falcon-h1": ("gated_norm.gated",),
    "minicpm3": (
        "norm.sum_rms_norm",
        "latent.latent_write",
        "latent.absorb_queries",
        "latent.latent_decode",
        "latent.expand_values",
        "latent.latent_read",
        "latent.attend_piece",
    ),
    "glm-moe-dsa": ("latent.index_write",),
    "deepseek-v4": (
        "compressed.write_rows",
        "compressed.rotate_last",
        "compressed.normed_write",
        "compressed.compress",
        "compressed.attend_rows",
        "hyper.read_streams",
        "hyper.write_streams",
        "hyper.join_streams",
    ),
}
"""By model: kernels that a dense model does not call."""
LONGEST = {"deepseek-v4": 24}
"""Tokens of a prompt, of models whose references take long for each: more than its window has and
than it compresses into one."""
OF_FP8 = ("scaled_gemm.linear", "scaled_gemm.in_fp8")
OF_PARTS = ("lora_ops.complete",)
"""For partial sums, which references' products do not have."""
ELSEWHERE = {*chain(*HYBRIDS.values()), *OF_FP8, *OF_PARTS}
OF_DENSE = [op for op in RESULTS if not op.startswith(OF_EXPERTS) and op not in ELSEWHERE]
NOT_CALLED = (
    "attention.decode_attention", "attention.prefill_attention", "gemm.is_for",
    "scaled_gemm.is_for", "gemm.form_for", "scaled_gemm.form_for", "latent.merge",
    "latent.attend_chosen", "compressed.choose_entries",
)  # fmt: skip
"""By a step: parts of what is compared, what only says what `linear` takes, what joins pieces of
prompts that are longer than these, and what an index does if queries see more tokens than these."""


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Parity:
    return Parity(tmp_path_factory.mktemp("dense"), "llama", "bfloat16", Side.REFERENCES)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Parity:
    return Parity(tmp_path_factory.mktemp("sparse"), "qwen3-moe", "bfloat16", Side.REFERENCES)


def test_without_a_fault_nothing_is_found(dense: Parity, sparse: Parity) -> None:
    every = batches(COUNT)
    for parity, some in ((dense, every), (sparse, {"scored": every["scored"]})):
        parity.against_cpu(parity.compute(some, max_num_seqs=8))  # as where there is one


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_runners_numbers_is_found_in_half_precision(
    dense: Parity, fault: str
) -> None:
    assert verdict(dense, fault, COUNT) is not None


def assert_each_is_found(parity: Parity, ops: Sequence[str], longest: int | None = None) -> None:
    """With kernels bent the comparison names them and no other, and with none it finds nothing.
    Every other one is bent at a time, so that one that is right gets what a bent one gives."""
    alone = [[op] for op in ops if op in BENT_ALONE]
    others = [op for op in ops if op not in BENT_ALONE]
    with BentKernels().found(parity, longest) as wrong_with:
        assert wrong_with(()) == set()
        for bent in filter(None, (*alone, others[::2], others[1::2])):
            assert wrong_with(bent) == set(bent)


def test_a_kernel_that_computes_something_else_is_found(dense: Parity) -> None:
    assert_each_is_found(dense, OF_DENSE)


def test_a_kernel_of_experts_that_computes_something_else_is_found(sparse: Parity) -> None:
    assert_each_is_found(sparse, [name for name in RESULTS if name.startswith(OF_EXPERTS)])


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_kernel_of_hybrids_that_computes_something_else_is_found(
    tmp_path: Path, kind: str
) -> None:
    parity = Parity(tmp_path, kind, "bfloat16", Side.REFERENCES)
    assert_each_is_found(parity, HYBRIDS[kind], LONGEST.get(kind))


def test_q01_products_of_fp8_are_compared_and_their_rounding_is_allowed(tmp_path: Path) -> None:
    """Q01: the comparison takes an engine that rounds rows to FP8, and finds a wrong product."""
    parity = Parity(tmp_path, "llama-fp8-row", "bfloat16", Side.REFERENCES)
    parity.against_cpu(parity.compute({"scored": batches(COUNT)["scored"]}, max_num_seqs=8))
    assert_each_is_found(parity, OF_FP8)


def test_q01_rows_may_be_rounded_by_another_scale_and_their_product_is_held_to_its_bound() -> None:
    """Q01: of two scales with equal errors a kernel may take the other one. The product is compared
    on the rows that the kernel rounded, so it is not wrong for that; a wrong product still is."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 128, generator=generator).bfloat16()
    weight = ScaledMatrix(*quantize_rows(torch.randn(96, 128, generator=generator) / 4), 128)
    references = choice.reference_kernels()

    def rounded(rows: Tensor, form: Fp8Form) -> Fp8Rows:
        scales = fp8_rows.in_fp8(rows, form).scales * 1.0625
        data = (rows.float() / scales).to(torch.float8_e4m3fn)
        return Fp8Rows(data[None], scales, rows.shape[1], rows.dtype)

    def verdict_on(factor: float) -> Record:
        def linear(rows: Any, *rest: Any) -> Tensor:
            given = rounded(rows, Fp8Form(1, 128)) if isinstance(rows, Tensor) else rows
            return references.scaled_gemm.linear(given, *rest) * factor

        room = SimpleNamespace(
            **{**vars(references.scaled_gemm), "linear": linear, "in_fp8": rounded}
        )
        record = Record(torch.bfloat16)
        record.is_on = True
        checked_kernels(replace(references, scaled_gemm=room), record).scaled_gemm.linear(x, weight)
        return record

    verdict_on(1.0).check()
    with pytest.raises(AssertionError, match=r"scaled_gemm\.linear"):
        verdict_on(1.2).check()


def test_every_kernel_that_has_a_reference_is_compared() -> None:
    pytest.importorskip("triton", reason="triton is not installed: its kernels can't be listed")
    for room in fields(Kernels):
        reference = getattr(choice.reference_kernels(), room.name)
        fast = vars(getattr(choice.kernel_set_of("triton"), room.name))
        for name, member in vars(reference).items():
            is_own = callable(member) and member.__module__ == reference.__name__
            if (
                is_own
                and not name.startswith("_")
                and fast.get(name, member) is not member
                and not isinstance(member, type)
            ):
                assert f"{room.name}.{name}" in {*RESULTS, *NOT_CALLED}
