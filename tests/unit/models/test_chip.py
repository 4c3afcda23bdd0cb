"""A CPU is described by torch, or by Linux where torch says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from manyroots.models.chip import Chip, describe_chip, read_cpuinfo, this_chip

SAPPHIRE_RAPIDS = {
    "model name": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz",
    "flags": "fpu sse2 fma avx2 f16c avx512f avx512bw avx512_bf16 amx_bf16 avx512_fp16 amx_tile",
}
GRAVITON3 = {"CPU part": "0xd40", "Features": "fp asimd asimdhp asimddp sve i8mm bf16"}
GRAVITON2 = {"CPU part": "0xd0c", "Features": "fp asimd asimdhp asimddp"}


@pytest.mark.parametrize(
    ("cpuinfo", "name", "products"),
    [
        (SAPPHIRE_RAPIDS, "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "amx_bf16"),
        ({"model name": "AMD EPYC 9654", "flags": "avx2 avx512f avx512_bf16"}, "AMD EPYC 9654",
         "avx512_bf16"),
        ({"model name": "Xeon Gold 6148", "flags": "avx2 avx512f avx512bw"}, "Xeon Gold 6148",
         None),
        (GRAVITON3, "Neoverse-V1", "bf16"),
        (GRAVITON2, "Neoverse-N1", None),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)  # fmt: skip
def test_linux_names_a_chip_and_its_instructions(
    cpuinfo: dict[str, str], name: str, products: str | None
) -> None:
    chip = describe_chip({}, cpuinfo, library_has_bf16=True)
    assert (chip.name, chip.bf16_products) == (name, products)


def test_what_torch_says_counts_and_has_linuxs_names() -> None:
    said = {"architecture": "x86_64", "avx512_f": True, "avx512_bf16": True, "amx_bf16": False,
            "l2_cache_size": 1}  # fmt: skip
    chip = describe_chip(said, SAPPHIRE_RAPIDS, library_has_bf16=True)
    assert chip.instructions == {"avx512f", "avx512_bf16"}
    said = {"architecture": "arm64", "bf16": True, "dot": True, "fp16_arith": True}
    chip = describe_chip(said, GRAVITON2, library_has_bf16=True)
    assert chip.instructions == {"bf16", "asimddp", "asimdhp"}


def test_a_library_without_bfloat16_makes_a_chip_one_without() -> None:
    chip = describe_chip({}, GRAVITON3, library_has_bf16=False)
    assert chip.bf16_products is None
    assert chip.is_slow_at(torch.bfloat16)
    assert not chip.is_slow_at(torch.float32)


def test_nothing_is_known_of_a_machine_that_says_nothing() -> None:
    chip = describe_chip({}, {}, library_has_bf16=False)
    assert chip.name
    assert chip.instructions == frozenset()


def test_torch_and_linux_agree_of_this_machine() -> None:
    if not Path("/proc/cpuinfo").exists():
        pytest.skip("nothing to compare with")
    chip = this_chip()
    linux = describe_chip({}, read_cpuinfo(), library_has_bf16=chip.library_has_bf16)
    assert isinstance(chip, Chip)
    assert chip.bf16_products == linux.bf16_products
    assert chip.name == linux.name
