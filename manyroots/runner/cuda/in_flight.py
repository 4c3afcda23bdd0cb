"""A launched step whose tokens are on their way to the host.

The copy is queued behind the step; whoever asks for the tokens waits for it. Any thread may ask.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from manyroots.runner.batch import Int64s
from manyroots.step import Bools, Int32s


class InFlight:
    """What one step sampled, and for whom."""

    def __init__(self, rows: Int32s, result: Tensor, at: Int64s) -> None:
        """`result`: int32 [2, n], tokens and whether logits were finite, for `rows` at the columns
        `at`. Read on the current stream, before whatever is launched there next."""
        self.rows = rows
        self._at = at
        self._event: torch.cuda.Event | None = None
        if result.device.type != "cuda":
            self._host = result.clone()
            return
        self._host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
        self._host.copy_(result, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has none here
        self._event.record()

    @property
    def is_done(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> tuple[Int32s, Bools]:
        """The tokens of `rows`, and whether their logits were finite."""
        if self._event is not None:
            self._event.synchronize()
        tokens, finite = self._host.numpy()[:, self._at]
        return tokens, finite.astype(np.bool_)
