"""Moved to `lora_sites/batch.py`; here until nothing asks for it by this name."""

from __future__ import annotations

from manyroots.kernels.lora_sites.batch import AdapterBatch

__all__ = ["AdapterBatch"]
