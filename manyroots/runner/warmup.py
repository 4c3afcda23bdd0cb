"""Steps that change no state, run before the first request: to compile, to capture, to measure.

Takes the parts of a runner; gives bytes, or leaves kernels compiled and graphs captured. All steps
use the spare row, whose keys and values are stored nowhere.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from manyroots.kernels.compile_ahead import begin_helpers, compile_ahead, end_helpers
from manyroots.kernels.lora_ops.sites import LoraRows
from manyroots.layers.step import LogitsIndices
from manyroots.process.progress import stage
from manyroots.runner.forward import Forward
from manyroots.runner.graphs import Graphs
from manyroots.runner.inputs import Int64s, blank_prefill
from manyroots.runner.mixed import MixedShape, all_shapes
from manyroots.runner.packet import send
from manyroots.runner.sampling_state import SamplingState
from manyroots.runner.step_arrays import sequence_arrays, token_arrays
from manyroots.runner.views import StepViews

WARM_TOKENS = (96, 160, 1024, 2048, 4096)
"""Prompts whose kernels are compiled ahead: more than the skinny products take, and with experts
many enough for small tiles, and for large ones; and long enough for long prompts' attention. And as
many tokens as a step may have."""
WARM_SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Tokens that are sampled in a step kernel by kernel: its last products have so many rows, and
kernels are compiled for powers of two."""


def prepare_warm_up() -> None:
    """Before weights are loaded on a GPU, so that what compiles imports torch meanwhile."""
    begin_helpers()


class Warmup:
    """A runner on a GPU, before it serves."""

    def __init__(
        self,
        forward: Forward,
        graphs: Graphs | None,
        state: SamplingState,
        *,
        max_len: int,
    ) -> None:
        self._forward = forward
        self._graphs = graphs
        self._state = state
        self._max_len = max_len
        self._device = forward.decoder.device

    def warm_up(self, max_num_tokens: int, *, has_adapters: bool) -> None:
        """Compile and capture what the first requests would otherwise wait for, with steps of at
        most so many tokens."""
        self._compile(max_num_tokens, has_adapters=has_adapters)
        end_helpers()
        if self._graphs is not None:
            with stage("of it capturing"):
                self._graphs.capture_all(self._mixed(max_num_tokens))
        with self._forward.decoder.one_of_each_kind():
            self._prefills(max_num_tokens, has_adapters=has_adapters)

    def _compile(self, max_num_tokens: int, *, has_adapters: bool) -> None:
        """All that warming up launches, several kernels at a time."""

        def launch_all() -> None:
            with self._forward.decoder.one_of_each_kind():
                # Long prompts first: their kernels take longest to compile.
                self._prefills(max_num_tokens, has_adapters=has_adapters)
                self._sample()
                if self._graphs is not None:
                    self._graphs.launch_all(self._mixed(max_num_tokens))

        with stage("of it compiling"):
            compile_ahead(launch_all)

    def _prefills(self, max_num_tokens: int, *, has_adapters: bool) -> None:
        """Steps of every size, and one of every number of samples."""
        counts = {max_num_tokens, *(tokens for tokens in WARM_TOKENS if tokens < max_num_tokens)}
        for with_adapters in (True, False) if has_adapters else (False,):
            for count in sorted(counts, reverse=True):
                self._prefill(count, with_adapters=with_adapters)
            # So few tokens' products are partial sums, which are completed where rows are taken.
            self._prefill(
                min(max_num_tokens, *WARM_TOKENS), with_adapters=with_adapters, num_samples=1
            )
            for num_samples in WARM_SAMPLES:
                if num_samples <= min(max_num_tokens, self._forward.rows.spare.row):
                    self._prefill(
                        max_num_tokens, with_adapters=with_adapters, num_samples=num_samples
                    )

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

    def _prefill(
        self, num_tokens: int, *, with_adapters: bool, num_samples: int | None = None
    ) -> None:
        """`num_samples`: after how many tokens something is sampled; None: after all, but nothing
        is."""
        forward = self._forward
        inputs = blank_prefill(
            num_tokens, forward.rows.spare, with_adapters=with_adapters, max_len=self._max_len
        )
        named = send({**token_arrays(inputs), **sequence_arrays(inputs)}, self._device)
        indices = None
        if num_samples is not None:
            slots = None if inputs.token_slots is None else inputs.token_slots[:num_samples]
            at = send({"at": np.arange(num_samples)}, self._device)["at"]
            indices = LogitsIndices(at, self._lora(slots))
        tokens, step = forward.step(
            StepViews.of(named), inputs.num_decodes, self._lora(inputs.token_slots),
            max_chunk=int(np.diff(inputs.query_starts).max()), logits_indices=indices,
            prompt_lens=inputs.prompt_lens,
        )  # fmt: skip
        hidden = forward.decoder.hidden(tokens, step)
        if indices is not None:
            forward.decoder.logits(hidden, indices.lora)

    def _lora(self, slots: Int64s | None) -> LoraRows | None:
        """Rows of a step with adapters: of the first slot, which has none yet. Of rows of the base
        model alone, layers that take some rows launch less."""
        return None if slots is None else LoraRows.build(np.zeros_like(slots), self._device)

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
