"""Carries out plans with torch: adapters and state first, then the model, then the sampler.

One thread of its own runs the steps in the order they were launched, so that planning the next
step overlaps with computing this one. Loads of adapters run beside the steps, and their answers
come with the next result. Decides nothing.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from manyroots.distributed.shard import WHOLE, Shard
from manyroots.ids import Row
from manyroots.kernels.attention.batch import AttentionBatch
from manyroots.kernels.lora.batch import AdapterBatch
from manyroots.runner.batch import PersistentBatch
from manyroots.runner.inputs import Int64s, StepInputs
from manyroots.runner.logprobs import POSITIONS_AT_ONCE, score
from manyroots.runner.sampler import Choices, Sampler
from manyroots.runner.sampling_state import SamplingState
from manyroots.step import AdapterLoaded, Int32s, Plan, RowFault, StepResult, TokenLogprobs
from manyroots.store.adapter_loader import AdapterLoader
from manyroots.store.arena import PageArena

MAX_WAIT_S = 0.005
"""How long a plan that waits may hold the thread: whoever comes meanwhile should not wait for
somebody else's adapter."""


class Model(Protocol):
    """What the runner needs of a model."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        arena: PageArena,
        adapters: AdapterBatch | None,
    ) -> Tensor: ...

    def logits(self, hidden: Tensor, adapters: AdapterBatch | None) -> Tensor: ...


class TorchRunner:
    """A model, its pages, and the rows under way."""

    def __init__(
        self,
        model: Model,
        arena: PageArena,
        adapters: AdapterLoader | None,
        *,
        max_num_seqs: int,
        max_model_len: int,
        shard: Shard = WHOLE,
    ) -> None:
        """`adapters`: None for a runner of the base model alone. `shard`: the rank's place among
        those that launch the same plans."""
        self._shard = shard
        self._model = model
        self._arena = arena
        self._adapters = adapters
        self._batch = PersistentBatch(
            max_num_seqs=max_num_seqs, max_model_len=max_model_len, page_size=arena.page_size
        )
        self._state = SamplingState(max_num_seqs)
        self._sampler = Sampler(self._batch, self._state)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="runner")

    def launch(self, plan: Plan) -> Future[StepResult]:
        return self._thread.submit(self.execute, plan)

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        if self._adapters is not None:
            self._adapters.close()

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepResult:
        """One step, now."""
        self._batch.apply(plan)
        for arrival in plan.arrivals:
            self._state.arrive(arrival)
        if plan.copies:
            raise RuntimeError("this runner has no lower tiers yet")
        if plan.adapters:
            self._loader().start(plan.adapters)
        if len(plan.rows) == 0:
            if plan.waits:
                self._loader().wait(MAX_WAIT_S)
            return StepResult(plan.step_id, np.empty(0, np.int32), adapters=self._answers())
        inputs = self._batch.inputs(plan)
        hidden = self._forward(inputs)
        prompt_logprobs = self._score_prompts(inputs, hidden)

        rows = inputs.rows[inputs.sampling]
        if len(rows) == 0:
            return StepResult(
                plan.step_id,
                np.empty(0, np.int32),
                prompt_logprobs=prompt_logprobs,
                adapters=self._answers(),
            )
        logits = self._logits(inputs, hidden, inputs.sampled_at)
        # The sampler may change logits; log-probabilities are of the model's own.
        wanted = np.flatnonzero(self._state.wants_logprobs[rows])
        own = logits[torch.from_numpy(wanted)].clone() if len(wanted) else None
        choices = self._sample(logits, rows)
        tokens = choices.tokens
        self._batch.append(rows, tokens)
        return StepResult(
            plan.step_id,
            tokens[inputs.sampling_order],
            logprobs=self._score_samples(own, rows[wanted], tokens[wanted]),
            prompt_logprobs=prompt_logprobs,
            faults=tuple(RowFault(Row(int(rows[i])), why) for i, why in choices.faults.items()),
            adapters=self._answers(),
        )

    def _sample(self, logits: Tensor, rows: Int32s) -> Choices:
        """The first rank's choice, which the others follow; they look for no faults."""
        if self._shard.is_first:
            choices = self._sampler.sample(logits, rows)
        else:
            choices = Choices(np.empty(len(rows), np.int32), {})
        return Choices(self._shard.agree(choices.tokens), choices.faults)

    def _loader(self) -> AdapterLoader:
        if self._adapters is None:
            raise RuntimeError("a plan names adapters, and this runner was made without them")
        return self._adapters

    def _answers(self) -> tuple[AdapterLoaded, ...]:
        """Taken when a result is made and not before: a step that fails loses none."""
        return () if self._adapters is None else self._adapters.finished()

    def _logits(self, inputs: StepInputs, hidden: Tensor, at: Int64s) -> Tensor:
        """Scores behind the flat tokens `at`, with the adapter of each."""
        adapters = None
        if inputs.token_slots is not None:
            adapters = self._loader().slots.batch(inputs.token_slots[at], all_layers=False)
        return self._model.logits(hidden[self._to_device(at)], adapters)

    def _forward(self, inputs: StepInputs) -> Tensor:
        max_pages = -(-int(inputs.context_lens.max()) // self._arena.page_size)
        batch = AttentionBatch.build(
            page_table=self._batch.page_tables[0, inputs.rows, :max_pages],
            slot_pages=inputs.pages[0],
            slot_offsets=inputs.offsets,
            query_starts=inputs.query_starts.tolist(),
            context_lens=inputs.context_lens.tolist(),
            num_decodes=inputs.num_decodes,
            page_size=self._arena.page_size,
            dtype=self._arena.data.dtype,
            device=self._arena.data.device,
        )
        tokens, positions = self._to_device(inputs.tokens), self._to_device(inputs.positions)
        adapters = None
        if inputs.token_slots is not None:
            adapters = self._loader().slots.batch(inputs.token_slots, all_layers=True)
        return self._model.forward(tokens, positions, batch, self._arena, adapters)

    def _score_samples(
        self, logits: Tensor | None, rows: Int32s, tokens: Int32s
    ) -> dict[Row, TokenLogprobs]:
        if logits is None:
            return {}
        counts = [self._state.params[row].logprobs or 0 for row in rows.tolist()]
        scores = score(logits, self._to_device(tokens.astype(np.int64)), counts)
        return {Row(row): entry for row, entry in zip(rows.tolist(), scores, strict=True)}

    def _score_prompts(
        self, inputs: StepInputs, hidden: Tensor
    ) -> dict[Row, tuple[TokenLogprobs, ...]]:
        """Rows that ask: how likely the model thought each next token of their prompt."""
        result: dict[Row, tuple[TokenLogprobs, ...]] = {}
        for index in np.flatnonzero(self._state.wants_prompt_logprobs[inputs.rows]).tolist():
            row = int(inputs.rows[index])
            begin, end = (int(s) for s in inputs.query_starts[index : index + 2])
            first = int(inputs.positions[begin])
            count = min(end - begin, int(self._batch.num_prompt_tokens[row]) - 1 - first)
            if count <= 0:
                continue
            targets = self._batch.known(row)[first + 1 : first + 1 + count].astype(np.int64)
            num_top = self._state.params[row].prompt_logprobs or 0
            scores: list[TokenLogprobs] = []
            for at in range(0, count, POSITIONS_AT_ONCE):
                part = self._to_device(targets[at : at + POSITIONS_AT_ONCE])
                logits = self._logits(inputs, hidden, begin + np.arange(at, at + len(part)))
                scores.extend(score(logits, part, [num_top] * len(part)))
            result[Row(row)] = tuple(scores)
        return result

    def _to_device(self, array: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._arena.data.device)
