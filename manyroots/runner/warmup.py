"""Steps that change no state, run before the first request: to compile, to capture, to measure.

Takes the parts of a runner; gives bytes, or leaves kernels compiled and graphs captured. All steps
use the spare row, whose keys and values are stored nowhere.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from manyroots.kernels.compile_ahead import compile_ahead
from manyroots.kernels.lora_ops.sites import LoraRows
from manyroots.runner.forward import Forward
from manyroots.runner.graphs import Graphs
from manyroots.runner.inputs import Int64s, blank_prefill
from manyroots.runner.mixed import MixedShape, all_shapes
from manyroots.runner.packet import send
from manyroots.runner.sampling_state import SamplingState
from manyroots.runner.step_arrays import sequence_arrays, token_arrays
from manyroots.runner.views import StepViews

WARM_TOKENS = (96, 160, 1024, 2048)
"""Prompts whose kernels are compiled ahead: more than the skinny products take, and with experts
many enough for small tiles, and for large ones; and long enough for long prompts' attention."""

Lora = Callable[[Int64s | None], LoraRows | None]
"""The adapters of tokens with these slots."""


class Warmup:
    """A runner on a GPU, before it serves."""

    def __init__(
        self,
        forward: Forward,
        graphs: Graphs | None,
        state: SamplingState,
        lora: Lora,
        *,
        max_len: int,
    ) -> None:
        self._forward = forward
        self._graphs = graphs
        self._state = state
        self._lora = lora
        self._max_len = max_len
        self._device = forward.decoder.device

    def warm_up(self, max_num_tokens: int, *, has_adapters: bool) -> None:
        """Compile and capture what the first requests would otherwise wait for, with steps of at
        most so many tokens."""
        self._compile(max_num_tokens, has_adapters=has_adapters)
        if self._graphs is not None:
            self._graphs.capture_all(self._mixed(max_num_tokens))
        self._prefills(has_adapters=has_adapters)

    def _compile(self, max_num_tokens: int, *, has_adapters: bool) -> None:
        """All that warming up launches, several kernels at a time."""

        def launch_all() -> None:
            if self._graphs is not None:
                self._graphs.launch_all(self._mixed(max_num_tokens))
            self._prefills(has_adapters=has_adapters)
            self._prefill(min(max_num_tokens, self._max_len), with_adapters=has_adapters)
            self._sample()

        compile_ahead(launch_all)

    def _prefills(self, *, has_adapters: bool) -> None:
        for count in sorted({min(tokens, self._max_len) for tokens in WARM_TOKENS}):
            for with_adapters in (False, True) if has_adapters else (False,):
                self._prefill(count, with_adapters=with_adapters)

    def measure(self, max_num_tokens: int, num_kinds: int) -> int:
        """Bytes that steps of this many tokens need in addition to what is allocated, including
        graphs of `num_kinds`. Computes one step, with the sampling that needs the most memory."""
        self._compile(max_num_tokens, has_adapters=False)
        count = min(max_num_tokens, self._max_len)
        hidden = self._peak_bytes(lambda: self._prefill(count, with_adapters=False))
        sampling = self._peak_bytes(self._sample)
        graphs = 0
        if self._graphs is not None:
            graphs = self._graphs.measure(num_kinds, self._mixed(max_num_tokens))
        return hidden * max_num_tokens // count + sampling + graphs

    def _mixed(self, max_num_tokens: int) -> list[MixedShape]:
        """Steps of prompts beside decodes that are graphs: none where layers need more of them than
        their size."""
        families = self._forward.decoder.families
        if not all(family.memory.may_pad_prompts for family in families):
            return []
        return all_shapes(self._forward.rows.spare.row, max_num_tokens)

    def _prefill(self, num_tokens: int, *, with_adapters: bool) -> None:
        forward = self._forward
        inputs = blank_prefill(num_tokens, forward.rows.spare, with_adapters=with_adapters)
        named = send({**token_arrays(inputs), **sequence_arrays(inputs)}, self._device)
        lora = self._lora(inputs.token_slots)
        tokens, step = forward.step(
            StepViews.of(named), inputs.num_decodes, lora, max_chunk=num_tokens,
            prompt_lens=inputs.prompt_lens,
        )  # fmt: skip
        forward.decoder.hidden(tokens, step)

    def _sample(self) -> None:
        decoder, spare_row = self._forward.decoder, self._forward.rows.spare.row
        rows = np.full(spare_row, spare_row, np.int32)
        arrays = self._state.arrays(rows, np.zeros(len(rows), np.int64))
        arrays["temperature"][:], arrays["top_p"][:] = 1.0, 0.9
        hidden = torch.zeros(
            len(rows), decoder.spec.hidden_size, dtype=decoder.dtype, device=self._device
        )
        self._forward.choose(decoder.logits(hidden, None), send(arrays, self._device))

    def _peak_bytes(self, compute: Callable[[], object]) -> int:
        """The most that was allocated at once, beyond what is now."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        compute()
        return torch.cuda.max_memory_allocated(self._device) - before
