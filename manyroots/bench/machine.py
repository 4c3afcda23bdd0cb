"""What a figure was measured on."""

from __future__ import annotations

import os
import platform

import torch
import transformers

from manyroots.models.chip import TELLING, this_chip
from manyroots.version import __version__


def describe_machine() -> dict[str, object]:
    """Facts that make two figures comparable, or not."""
    chip = this_chip()
    facts: dict[str, object] = {
        "manyroots": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpu": chip.name,
        "cpu_instructions": [name for name in TELLING if name in chip.instructions],
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts
