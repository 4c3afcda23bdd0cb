"""Carries out plans on a GPU: launches steps ahead of their results.

A step is launched as soon as its plan is there; its tokens stay on the device for the next step
and travel to the host beside it. One thread launches, a second waits for tokens and answers, so
that nobody waits for the device who could be preparing its next step.

A step that only decodes, or has few tokens, with nothing asked of sampling but temperature, is a
graph. Every other step runs the same kernels one by one, and `Sampler` chooses for the rows that
ask for more.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from manyroots.ids import Row
from manyroots.kernels.attention.paged import DecodeRows, PrefillSegments
from manyroots.kernels.choice import kernels_for
from manyroots.kernels.fused_step import FusedStep
from manyroots.kernels.lora_sites.sites import LoraRows
from manyroots.kernels.rope_write.inputs import KvPlaces
from manyroots.models.fused import FusedDecoder
from manyroots.models.llama import Llama
from manyroots.runner.device_rows import DeviceRows
from manyroots.runner.graphs import DecodeGraphs, lora_rows
from manyroots.runner.in_flight import InFlight, PendingTokens
from manyroots.runner.inputs import Int64s, StepInputs, as_single_tokens, blank_prefill, is_short
from manyroots.runner.packet import send
from manyroots.runner.sampler import NOT_FINITE
from manyroots.runner.step_arrays import (
    Arrays,
    adapter_arrays,
    decode_arrays,
    sampling_arrays,
    sequence_arrays,
    token_arrays,
)
from manyroots.runner.torch_runner import MAX_WAIT_S, TorchRunner
from manyroots.step import Int32s, Plan, RowFault, StepResult, TokenLogprobs
from manyroots.store.adapter_loader import AdapterLoader
from manyroots.store.arena import PageArena

WARM_TOKENS = (96, 160, 1024)
"""Prompts whose kernels are compiled ahead: more than the skinny products take, and with experts
many enough for small tiles, and for large ones."""

Answer = Callable[[], StepResult]
"""Waits for a launched step and gives its result."""


class CudaRunner(TorchRunner):
    """A model, its pages, and the rows under way, on the device and on the host."""

    def __init__(
        self,
        model: Llama,
        arena: PageArena,
        adapters: AdapterLoader | None,
        *,
        max_num_seqs: int,
        max_model_len: int,
        use_graphs: bool,
    ) -> None:
        """`adapters` must load into an `AdapterPool`."""
        super().__init__(
            model, arena, adapters, max_num_seqs=max_num_seqs, max_model_len=max_model_len
        )
        self._device = arena.data.device
        self._kernels = kernels_for(self._device)
        self._pool = None if adapters is None else adapters.pool
        self._decoder = FusedDecoder(model, arena, self._kernels, self._pool, max_len=max_model_len)
        self._pending = PendingTokens(self._batch)
        self._rows = DeviceRows(self._batch, self._device)
        self._graphs = DecodeGraphs(
            self._decoder,
            self._kernels,
            self._rows,
            num_slots=None if self._pool is None else self._pool.num_slots,
            capture=use_graphs,
        )
        self._answers_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokens")

    def warm_up(self) -> None:
        """Compile and capture now what the first requests would otherwise wait for."""
        self._thread.submit(self._warm_up).result()

    @torch.inference_mode()
    def _warm_up(self) -> None:
        if self._device.type != "cuda":
            return
        self._graphs.capture_all()
        most = self._rows.page_tables.shape[2] * self._arena.page_size
        for count in sorted({min(tokens, most) for tokens in WARM_TOKENS}):
            for with_adapters in (False, True) if self._pool is not None else (False,):
                inputs = self._blank(count, with_adapters=with_adapters)
                self._hidden(inputs, send(self._arrays(inputs), self._device))

    def _blank(self, num_tokens: int, *, with_adapters: bool) -> StepInputs:
        return blank_prefill(
            num_tokens,
            self._rows.spare_row,
            num_families=len(self._rows.page_tables),
            with_adapters=with_adapters,
        )

    def measure_step(self, max_num_tokens: int, *, with_adapters: bool) -> int:
        """Bytes that steps of so many tokens take beyond weights and pages, graphs included (twice
        as many with adapters).

        Measured by computing one, with every row sampled in the way that takes most. The rows'
        state is used for it: this runner is for nothing else.
        """
        num_kinds = 2 if with_adapters else 1
        return self._thread.submit(self._measure_step, max_num_tokens, num_kinds).result()

    @torch.inference_mode()
    def _measure_step(self, max_num_tokens: int, num_kinds: int) -> int:
        count = min(max_num_tokens, self._rows.page_tables.shape[2] * self._arena.page_size)
        inputs = self._blank(count, with_adapters=False)
        arrays = self._arrays(inputs)
        hidden = self._peak_bytes(lambda: self._hidden(inputs, send(arrays, self._device)))
        rows = np.arange(self._rows.spare_row, dtype=np.int32)
        self._state.temperature[:], self._state.top_p[:] = 1.0, 0.9
        sampling = self._peak_bytes(lambda: self._sample_blank(rows))
        return hidden * max_num_tokens // count + sampling + self._graphs.measure(num_kinds)

    def _sample_blank(self, rows: Int32s) -> None:
        weight = self._decoder.spec.hidden_size
        hidden = torch.zeros(len(rows), weight, dtype=self._arena.data.dtype, device=self._device)
        tokens = torch.zeros(len(rows), dtype=torch.int32, device=self._device)
        self._choose_special(self._decoder.logits(hidden), tokens, rows)

    def _peak_bytes(self, compute: Callable[[], object]) -> int:
        """The most that was allocated at once, beyond what is now."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        compute()
        return torch.cuda.max_memory_allocated(self._device) - before

    def launch(self, plan: Plan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self._thread.submit(self._launch, plan, future)
        return future

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._answers_thread.shutdown(wait=True)
        super().close()

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepResult:
        """One step, now."""
        return self._begin(plan)()

    @torch.inference_mode()
    def _launch(self, plan: Plan, future: Future[StepResult]) -> None:
        try:
            answer = self._begin(plan)
        except BaseException as error:
            future.set_exception(error)
        else:
            self._answers_thread.submit(_resolve, future, answer)

    def _begin(self, plan: Plan) -> Answer:
        """Launch a step; gives what waits for it."""
        self._batch.apply(plan)
        self._pending.apply(plan)
        for arrival in plan.arrivals:
            self._state.arrive(arrival)
        self._rows.apply(plan)
        self._pending.learn()
        if plan.copies:
            raise RuntimeError("this runner has no lower tiers yet")
        if plan.adapters:
            self._loader().start(plan.adapters)
        if len(plan.rows) == 0:
            if plan.waits:
                self._loader().wait(MAX_WAIT_S)
            return lambda: StepResult(plan.step_id, np.empty(0, np.int32), adapters=self._answers())
        inputs = self._batch.inputs(plan)
        if not self._is_plain(inputs):
            return self._begin_any(plan, inputs, inputs.rows[inputs.sampling])
        if not inputs.is_decode:
            inputs = as_single_tokens(inputs)
        rows = inputs.rows[inputs.sampling]
        return self._answer(plan, inputs, InFlight(rows, self._decode(inputs), inputs.sampling))

    def _is_plain(self, inputs: StepInputs) -> bool:
        """Whether a graph computes all that this step is asked for."""
        return (
            (inputs.is_decode or self._is_short(inputs))
            and not self._is_special(inputs.rows).any()
            and not self._state.wants_prompt_logprobs[inputs.rows].any()
        )

    def _is_short(self, inputs: StepInputs) -> bool:
        return self._graphs.has_room_for(len(inputs.tokens)) and is_short(inputs)

    def _is_special(self, rows: Int32s) -> np.ndarray:
        """Rows that `Sampler` must choose for."""
        state = self._state
        special: np.ndarray = state.is_cut(rows) | state.edits_logits[rows]
        special |= state.wants_logprobs[rows]
        if state.failures:
            special |= np.isin(rows, list(state.failures))
        return special

    def _decode(self, inputs: StepInputs) -> Tensor:
        indices = self._batch.num_output_tokens(inputs.rows)
        arrays = decode_arrays(
            inputs,
            sampling_arrays(inputs.rows, self._state, indices),
            size=self._graphs.size_for(len(inputs.rows)),
            spare_row=self._rows.spare_row,
            num_slots=self._pool.num_slots
            if self._pool is not None and inputs.token_slots is not None
            else None,
        )
        return self._graphs.run(arrays)

    def _begin_any(self, plan: Plan, inputs: StepInputs, rows: Int32s) -> Answer:
        """A step of any kind, kernel by kernel."""
        arrays = self._arrays(inputs)
        indices = self._batch.num_output_tokens(rows)
        arrays.update(sampling_arrays(rows, self._state, indices))
        views = send(arrays, self._device)
        hidden = self._hidden(inputs, views)
        prompt_logprobs = self._score_prompts(inputs, hidden)
        if len(rows) == 0:
            return lambda: StepResult(
                plan.step_id,
                np.empty(0, np.int32),
                prompt_logprobs=prompt_logprobs,
                adapters=self._answers(),
            )
        logits = self._model_logits(inputs, hidden, inputs.sampled_at)
        tokens, finite = self._kernels.sampling.sample(
            logits, views["temperature"], views["seeds"], views["indices"]
        )
        logprobs, faults = self._choose_special(logits, tokens, rows)
        self._rows.keep(views["out_rows"], tokens)
        in_flight = InFlight(rows, torch.stack((tokens, finite.int())), np.arange(len(rows)))
        return self._answer(plan, inputs, in_flight, logprobs, prompt_logprobs, faults)

    def _arrays(self, inputs: StepInputs) -> Arrays:
        arrays: Arrays = {**token_arrays(inputs), **sequence_arrays(inputs)}
        if inputs.token_slots is not None:
            arrays.update(adapter_arrays(inputs.token_slots))
        return arrays

    def _hidden(self, inputs: StepInputs, views: dict[str, Tensor]) -> Tensor:
        count = inputs.num_decodes
        tables = self._rows.page_tables[0, views["rows"]]
        lens = views["lens"]
        has_others = count < len(inputs.rows)
        step = FusedStep(
            angles=self._decoder.angles(views["positions"]),
            slots=KvPlaces(views["pages"][0], views["offsets"]),
            decodes=DecodeRows(tables[:count], lens[:count]) if count else None,
            num_decodes=count,
            prefills=PrefillSegments(tables[count:], views["starts"], lens[count:], views["blocks"])
            if has_others
            else None,
            lora=lora_rows(views),
        )
        tokens = self._rows.tokens(views["tokens"], views["token_rows"])
        return self._decoder.hidden(tokens, step)

    def _model_logits(self, inputs: StepInputs, hidden: Tensor, at: Int64s) -> Tensor:
        """Scores behind the flat tokens `at`, in the model's dtype."""
        adapters: LoraRows | None = None
        if inputs.token_slots is not None:
            adapters = lora_rows(send(adapter_arrays(inputs.token_slots[at]), self._device))
        return self._decoder.logits(hidden[self._to_device(at)], adapters)

    def _logits(self, inputs: StepInputs, hidden: Tensor, at: Int64s) -> Tensor:
        return self._model_logits(inputs, hidden, at).float()

    def _choose_special(
        self, logits: Tensor, tokens: Tensor, rows: Int32s
    ) -> tuple[dict[Row, TokenLogprobs], dict[Row, str]]:
        """Put what `Sampler` chooses into `tokens`, for the rows that ask for it. Gives their
        scores, and the reasons of rows that it could choose nothing for."""
        special = np.flatnonzero(self._is_special(rows))
        if not len(special):
            return {}, {}
        if self._state.edits_logits[rows].any():
            # Penalties are of the tokens so far, which the last step may still be computing.
            self._pending.learn(wait=True)
        at = self._to_device(special)
        own = logits[at].float()
        choices = self._sampler.sample(own.clone(), rows[special])
        chosen = choices.tokens
        tokens[at] = torch.from_numpy(chosen).to(self._device)
        faults = {Row(int(rows[special[i]])): why for i, why in choices.faults.items()}
        wanted = np.flatnonzero(self._state.wants_logprobs[rows[special]])
        if not len(wanted):
            return {}, faults
        scored = own[self._to_device(wanted)]
        return self._score_samples(scored, rows[special][wanted], chosen[wanted]), faults

    def _answer(
        self,
        plan: Plan,
        inputs: StepInputs,
        step: InFlight,
        logprobs: dict[Row, TokenLogprobs] | None = None,
        prompt_logprobs: dict[Row, tuple[TokenLogprobs, ...]] | None = None,
        faults: dict[Row, str] | None = None,
    ) -> Answer:
        self._pending.expect(step)

        def answer() -> StepResult:
            tokens, finite = step.wait()
            broken = {Row(int(row)): NOT_FINITE for row in step.rows[~finite]}
            return StepResult(
                plan.step_id,
                tokens[inputs.sampling_order],
                logprobs=logprobs or {},
                prompt_logprobs=prompt_logprobs or {},
                faults=tuple(RowFault(*fault) for fault in {**broken, **(faults or {})}.items()),
                adapters=self._answers(),
            )

        return answer


def _resolve(future: Future[StepResult], answer: Answer) -> None:
    try:
        result = answer()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
