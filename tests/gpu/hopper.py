"""A Hopper GPU as far as a compiler asks for one, to compile kernels for it where there is none."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

SHARED_BYTES = 232448
"""Of one program."""


class Hopper:
    """What a compiler asks of a driver."""

    class utils:  # noqa: N801
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": SHARED_BYTES}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for_hopper() -> None:
    """From now on, in this process; it can launch nothing afterwards."""
    driver.set_active(Hopper())
