"""Reference: the inputs of a step's recurrent layers, from the runner's arrays."""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.kernels.recurrent.rows import StateRows


def prepare(
    units: Tensor,
    context_lens: Tensor,
    prompt_starts: Tensor | None,
    num_decodes: int,
    max_len: int,
) -> StateRows:
    """`units` and `context_lens` are int32 [num_seqs]; the second counts a sequence's tokens
    including this step's. `prompt_starts`: for the sequences after the decoding ones, the first
    token of each, and the end; None if there are none."""
    starts = torch.arange(num_decodes + 1, dtype=torch.int32, device=units.device)
    if prompt_starts is not None:
        starts = torch.cat([starts[:-1], prompt_starts])
    is_fresh = context_lens == starts.diff()
    return StateRows(units.long(), starts, num_decodes, is_fresh, max_len)
