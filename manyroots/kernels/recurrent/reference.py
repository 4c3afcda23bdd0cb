"""What a step's recurrent layers read, from what the runner sends; naive."""

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
    """`units` and `context_lens` int32 [num_seqs]; the second counts a sequence's tokens up to and
    including this step's. `prompt_starts`: of the sequences behind the decoding ones, the first
    token of each, and the end; None if there are none."""
    starts = torch.arange(num_decodes + 1, dtype=torch.int32, device=units.device)
    if prompt_starts is not None:
        starts = torch.cat([starts[:-1], prompt_starts])
    is_fresh = context_lens == starts.diff()
    return StateRows(units.long(), starts, num_decodes, is_fresh, max_len)
