"""Carries out plans: one runner for a CPU, for a GPU and for a rank among several.

In: plans. Out: results, in order. A step is launched as soon as its plan is there; its tokens stay
on the device for the next step and travel to the host beside it. One thread launches; where the
device computes by itself, a second one waits for tokens and answers, so that no thread waits for
the device that could prepare its next step. Adapters load beside the steps, and their answers come
with the next result. Decides nothing.

On a GPU a step that only decodes or has few tokens is a graph. Every other step, and every step of
a CPU, runs the same kernels one by one, as large as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from manyroots.grammar.cache import GrammarCache
from manyroots.ids import Row
from manyroots.kernels.lora_ops.sites import LoraRows
from manyroots.kernels.sampling.rows import SamplingTables
from manyroots.layers.memories import KV
from manyroots.layers.step import LogitsIndices
from manyroots.models.decoder import Decoder
from manyroots.runner import choices
from manyroots.runner.answers import AnsweredWhenAsked, resolve
from manyroots.runner.batch import PersistentBatch
from manyroots.runner.device_rows import DeviceRows
from manyroots.runner.drafts import CheckedDraft, DraftCheck, DraftRows, checked_drafts
from manyroots.runner.first_runs import FirstRuns
from manyroots.runner.forward import Forward, PacketViews
from manyroots.runner.graphs import GraphKey, Graphs
from manyroots.runner.in_flight import InFlight, PendingTokens
from manyroots.runner.inputs import (
    MAX_CHECKING_TOKENS,
    Int64s,
    StepInputs,
    as_single_tokens,
    is_short,
    table_rows_of,
)
from manyroots.runner.logprobs import score
from manyroots.runner.masks import RowMasks
from manyroots.runner.mixed import shape_for
from manyroots.runner.packet import send
from manyroots.runner.prediction import Guesses, PredictedTokens
from manyroots.runner.prompt_scores import PromptScorer, PromptScores
from manyroots.runner.repeated import RepeatedSteps, StepLayout
from manyroots.runner.sampling_state import DraftTables, SamplingState
from manyroots.runner.sharing import Sharing
from manyroots.runner.step_arrays import NamedArrays, run_arrays
from manyroots.runner.step_packets import StepPackets
from manyroots.runner.step_timer import Compute, StepTimer, TakeResult
from manyroots.runner.views import StepViews
from manyroots.runner.warmup import Warmup
from manyroots.step import (
    MAX_STEP_DRAFT_TOKENS,
    Floats,
    Int32s,
    Plan,
    RowFault,
    StepResult,
    TokenLogprobs,
)
from manyroots.store.adapter_loader import AdapterLoader
from manyroots.store.arena import Arena
from manyroots.store.device_copies import copy_within_device
from manyroots.store.layer_arrivals import LayerArrivals
from manyroots.store.mover import Mover
from manyroots.store.tier_copies import TierCopies

MAX_WAIT_S = 0.005
"""How long a plan that waits may hold the thread: a request that comes meanwhile should not wait
for another request's adapter."""
_NO_ADAPTERS = "a plan names adapters, and this runner was made without them"

T = TypeVar("T")
Scores = dict[int, TokenLogprobs]
"""By sample of a step."""
KeptHidden = tuple[Int32s, Tensor]
"""Rows, and the hidden state of each."""


class ModelRunner:
    """A model, its pages and its rows, on the device and on the host."""

    def __init__(
        self,
        decoder: Decoder,
        arenas: Sequence[Arena],
        adapters: AdapterLoader | None,
        tiers: TierCopies | None = None,
        *,
        page_size: int,
        max_num_seqs: int,
        max_model_len: int,
        use_graphs: bool = True,
        fixed_shapes: bool | None = None,
        grammars: GrammarCache | None = None,
        make_graphs: type[Graphs] = Graphs,
        drafts: bool = False,
        times_steps: bool = False,
    ) -> None:
        """`arenas`: one for each of the decoder's families. `adapters`: None for a runner of the
        base model alone. `tiers`: None for the device alone. `fixed_shapes`: whether steps are
        padded as graphs need it; None for what the device wants. `grammars`: those of
        requests whose output has a shape; None where another rank chooses tokens. `make_graphs`:
        what runs steps of fixed shapes. `drafts`: whether plans may have guesses to check.
        `times_steps`: whether results say what steps took, as they do with tiers."""
        self._decoder, self._device = decoder, decoder.device
        self._arenas = arenas
        self._mover = Mover(adapters, tiers)
        is_timed = times_steps or tiers is not None
        self._timer = StepTimer(self._device) if is_timed else None
        self._pool = None if adapters is None else adapters.pool
        decoder.attach(arenas, self._pool, max_len=max_model_len)
        self._batch = PersistentBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            page_size=page_size,
            num_paged=decoder.num_paged,
            spare_units=[a.spare_unit for a in arenas if a.spare_unit is not None],
        )
        self._pending = PendingTokens(self._batch)
        num_draft_rows = MAX_STEP_DRAFT_TOKENS if drafts else 0
        self._rows = DeviceRows(self._batch, self._device, num_draft_rows=num_draft_rows)
        tables = SamplingTables.zeros(
            max_num_seqs, decoder.spec.vocab_size, self._device, num_draft_rows=num_draft_rows
        )
        masks = None
        if grammars is not None:
            masks = RowMasks(grammars, self._batch, decoder.spec.vocab_size)
        self._state = SamplingState(max_num_seqs, tables, masks)
        self._repeated = RepeatedSteps(self._batch, self._state)
        self._drafts = DraftRows(self._batch, self._state, arenas[decoder.num_paged :])
        self._forward = Forward(decoder, self._rows, tables, page_size=page_size)
        self._prompts = PromptScorer(self._batch, self._state, self._logits, self._device)
        self._predicted: PredictedTokens | None = None
        """None if the model does not predict tokens ahead."""
        if decoder.prediction is not None:
            self._predicted = PredictedTokens(
                self._forward, self._batch, page_size=page_size, max_len=max_model_len
            )
            # Graphs give no hidden states.
            fixed_shapes = False
        is_gpu = self._device.type == "cuda"
        if fixed_shapes is None:
            fixed_shapes = is_gpu and decoder.kernels.ask_nothing
        self._first_runs = FirstRuns()
        self._graphs: Graphs | None = None
        self._sharing: Sharing | None = None
        """None where kernels group rows by themselves."""
        if fixed_shapes:
            self._sharing = Sharing(self._batch, self._forward.windows, page_size)
        self._packets = StepPackets(
            self._batch,
            self._state,
            self._rows,
            self._sharing,
            num_slots=0 if self._pool is None else self._pool.num_at_once,
            num_paged=decoder.num_paged,
        )
        if fixed_shapes:
            self._graphs = make_graphs(
                self._model,
                self._forward.choose,
                self._packets.blank,
                # A guess is a row of its own there.
                max_num_rows=max(max_num_seqs, MAX_CHECKING_TOKENS if drafts else 0),
                has_adapters=self._pool is not None,
                device=self._device,
                capture=is_gpu and use_graphs,
                first_runs=self._first_runs,
                checks_drafts=drafts,
                briefly=decoder.one_of_each_kind,
            )
        self._max_len, self._max_num_seqs = max_model_len, max_num_seqs
        self._may_split_prompts = all(f.memory.is_paged for f in decoder.families)
        self._reads_once = all(isinstance(f.memory, KV) for f in decoder.families)
        """Whether a step's metadata has runs for every family (`TokenRuns`)."""
        self._may_pad_prompts = all(f.memory.may_pad_prompts for f in decoder.families)
        self._newest: Future[StepResult] | None = None
        """Of the newest step."""
        self._computes_later = is_gpu
        """Whether a launched step computes beside its thread."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="runner")
        self._answers_thread = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokens") if is_gpu else None
        )

    def launch(self, plan: Plan) -> Future[StepResult]:
        is_idle = self._newest is None or self._newest.done()
        if plan.drafts and is_idle and self._computes_later:
            # The caller plans nothing before the result, and the device idles until this step is
            # launched: two other threads would only have to be woken.
            self._newest = self._launch_here(plan)
            return self._newest
        future: Future[StepResult] = Future()
        self._newest = future
        self._thread.submit(self._launch, plan, future)
        return future

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        if self._answers_thread is not None:
            self._answers_thread.shutdown(wait=True)
        self._mover.close()

    def forget_stored(self, hashes: Sequence[bytes]) -> None:
        """Remove pages from storage, if there is storage."""
        self._mover.forget_stored(hashes)

    def warm_up(self, max_num_tokens: int) -> None:
        """Compile kernels and capture graphs before the first requests, for steps of at most this
        many tokens."""
        if self._device.type == "cuda":
            has_adapters = self._pool is not None
            self._in_warmup(
                lambda warmup: warmup.warm_up(max_num_tokens, has_adapters=has_adapters)
            )
        self._thread.submit(self._first_runs.begin).result()

    def measure_step(self, max_num_tokens: int, *, with_adapters: bool) -> int:
        """Bytes that steps of this many tokens need on a GPU in addition to what is allocated now,
        including graphs (twice as many with adapters)."""
        num_kinds = 2 if with_adapters else 1
        return self._in_warmup(lambda warmup: warmup.measure(max_num_tokens, num_kinds))

    def _in_warmup(self, what: Callable[[Warmup], T]) -> T:
        warmup = Warmup(self._forward, self._graphs, self._state, max_len=self._max_len)
        return self._thread.submit(torch.inference_mode()(what), warmup).result()

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepResult:
        """One step, now."""
        return self._begin(plan)()

    @torch.inference_mode()
    def _launch_here(self, plan: Plan) -> Future[StepResult]:
        try:
            return AnsweredWhenAsked(self._begin(plan))
        except BaseException as error:
            future: Future[StepResult] = Future()
            future.set_exception(error)
            return future

    @torch.inference_mode()
    def _launch(self, plan: Plan, future: Future[StepResult]) -> None:
        try:
            answer = self._begin(plan)
        except BaseException as error:
            future.set_exception(error)
        else:
            if self._answers_thread is None:
                resolve(future, answer)
            else:
                self._answers_thread.submit(resolve, future, answer)

    def _begin(self, plan: Plan) -> TakeResult:
        """Launch a step; gives the function that waits for its result."""
        self._drafts.settle()
        self._batch.apply(plan)
        self._pending.apply(plan)
        self._state.apply(plan.arrivals)
        self._rows.apply(plan)
        if self._sharing is not None:
            self._sharing.apply(plan)
        self._repeated.apply(plan)
        self._pending.learn()
        if plan.lent_units:
            # No step reads them any more: on a CPU those before this one are done.
            self._arenas[0].give_back(plan.lent_units)
        # First: a load may fill what a restored state was copied from.
        copy_within_device(plan.copies, self._arenas, after_model=False)
        arrivals = self._mover.start(plan.adapters, plan.copies)
        self._mover.keep_stored(plan.keeps)
        if len(plan.rows) == 0:
            if plan.waits:
                self._mover.wait(MAX_WAIT_S)
            answer = self._answer_without_tokens(plan)
        else:
            compute = self._timed(self._compute)
            layout, graphs = None, self._graphs
            if arrivals is not None:
                # Not timed: most of it may be waiting.
                compute = partial(self._begin_any, arrivals=arrivals)
            elif plan.drafts and graphs is not None:
                layout = self._repeated.find(plan)
            if layout is None or graphs is None:
                answer = compute(plan, self._batch.inputs(plan))
            else:
                repeat = partial(self._begin_graph, graphs=graphs, layout=layout)
                answer = self._timed(repeat)(plan, self._repeated.step(layout))
        copy_within_device(plan.copies, self._arenas, after_model=True)
        return answer

    def _timed(self, compute: Compute) -> Compute:
        """Measures the model's time, if tiers compare it with loading (T05)."""
        return compute if self._timer is None else self._timer.timed(compute)

    def _compute(self, plan: Plan, inputs: StepInputs) -> TakeResult:
        if self._graphs is not None and self._fits_graph(inputs, self._graphs):
            if not inputs.is_decode:
                inputs = as_single_tokens(inputs)
            return self._begin_graph(plan, inputs, self._graphs)
        if self._graphs is not None and self._may_pad(inputs):
            answer = self._begin_mixed(plan, inputs, self._graphs)
            if answer is not None:
                return answer
        return self._begin_any(plan, inputs)

    def _model(self, views: PacketViews, key: GraphKey) -> Tensor:
        if key.mixed is None:
            return self._forward.single_tokens(views)
        return self._forward.mixed(views, key.mixed.num_decodes)

    def _fits_graph(self, inputs: StepInputs, graphs: Graphs) -> bool:
        """Whether a graph computes all that this step is asked for."""
        if not inputs.is_decode:
            # A recurrent layer computes a prompt's tokens one after the other, not side by side.
            if not self._may_split_prompts:
                return False
            if not is_short(inputs, reads_once=self._reads_once):
                return False
            if not graphs.has_room_for(len(inputs.tokens)):
                return False
        return self._wants_tokens_only(inputs)

    def _may_pad(self, inputs: StepInputs) -> bool:
        """Whether a graph of prompts beside decodes computes all that this step is asked for."""
        return not inputs.is_decode and self._may_pad_prompts and self._wants_tokens_only(inputs)

    def _wants_tokens_only(self, inputs: StepInputs) -> bool:
        """Whether rows want only tokens, and logprobs that the sampler gives."""
        wants_more = self._state.wants_prompt_logprobs | self._state.wants_hidden
        if wants_more[inputs.rows].any():
            return False
        return not self._state.exceeds_graph(inputs.rows[inputs.sampling])

    def _begin_graph(
        self, plan: Plan, inputs: StepInputs, graphs: Graphs, layout: StepLayout | None = None
    ) -> TakeResult:
        """A step of single tokens, in the next larger shape there is. `layout`: of a step that
        repeats an earlier one."""
        rows = inputs.rows[inputs.sampling]
        arrays: NamedArrays
        if layout is not None:
            arrays, drafts = layout.arrays, layout.drafts(plan)
        else:
            size = graphs.size_for(len(inputs.rows))
            arrays, drafts = self._packets.single_tokens(inputs, size), checked_drafts(plan, inputs)
            if drafts:
                arrays |= run_arrays(arrays["token_rows"], arrays["lens"])
                self._repeated.keep(plan, inputs, arrays, drafts)
            else:
                arrays |= self._packets.shared(inputs, size)
        if drafts:
            arrays = self._packets.with_shared(inputs, arrays)
            self._begin_drafts(inputs, drafts)
        between = partial(self._fill_masks, inputs, drafts) if self._state.has_masks(rows) else None
        step = InFlight(rows, graphs.run(arrays, between), inputs.sampled_at)
        return self._answer(plan, inputs, step, drafts, is_graph=graphs.was_replayed)

    def _begin_mixed(self, plan: Plan, inputs: StepInputs, graphs: Graphs) -> TakeResult | None:
        """A step of prompts beside decodes, in the next larger shape; None if there is none."""
        shape = shape_for(inputs, self._max_num_seqs)
        arrays = None if shape is None else self._packets.mixed(inputs, shape)
        if shape is None or arrays is None:
            return None
        rows = inputs.rows[inputs.sampling]
        arrays |= self._packets.shared(inputs, shape.num_decodes)
        drafts = checked_drafts(plan, inputs)
        self._begin_drafts(inputs, drafts)
        between = partial(self._fill_masks, inputs, drafts) if self._state.has_masks(rows) else None
        sampled = graphs.run(arrays, between, shape)
        if len(rows) == 0:
            return self._answer_without_tokens(plan)
        step = InFlight(rows, sampled, np.arange(len(rows)))
        return self._answer(plan, inputs, step, drafts, is_graph=graphs.was_replayed)

    def _begin_any(
        self, plan: Plan, inputs: StepInputs, arrivals: LayerArrivals | None = None
    ) -> TakeResult:
        """A step of any kind, kernel by kernel. `arrivals`: pages that arrive while it computes."""
        rows = inputs.rows[inputs.sampling]
        arrays, drafts = self._packets.any_step(inputs), checked_drafts(plan, inputs)
        self._begin_drafts(inputs, drafts)
        views = send(arrays, self._device)
        lora = self._lora(inputs.token_slots)
        logits_indices = self._logits_indices(inputs, views["sampled_at"])
        tokens, step_inputs = self._forward.step(
            StepViews.of(views),
            inputs.num_decodes,
            lora,
            max_chunk=int(np.diff(inputs.query_starts).max()),
            max_len=int(inputs.context_lens.max()),
            before_layer=None if arrivals is None else arrivals.before_layer,
            logits_indices=logits_indices,
            prompt_lens=inputs.prompt_lens,
        )
        hidden = self._decoder.hidden(tokens, step_inputs)
        predicted, filled = self._predicted, None
        if predicted is not None:
            filled = predicted.fill(inputs, hidden, tokens, step_inputs)
        prompt_scores = self._prompts.score(inputs, hidden)
        if len(rows) == 0:
            if predicted is not None and filled is not None:
                predicted.keep_newest(filled, (), None)
            return self._answer_without_tokens(plan, prompt_scores)
        if logits_indices is None:
            logits = self._logits(inputs, hidden, inputs.sampled_at, views["sampled_at"])
        else:
            logits = self._decoder.logits(hidden, logits_indices.lora)
        # The sampler may change logits; log-probabilities are of the model's own.
        own = logits.float().clone() if self._state.exceeds_graph(rows) else None
        if self._state.has_masks(rows):
            self._fill_masks(inputs, drafts)
        sampled = self._forward.choose(logits, views)
        scores = None if own is None else self._score_samples(own, sampled.tokens, rows)
        step = InFlight(rows, sampled, np.arange(len(rows)))
        places = np.arange(len(rows)) if logits_indices is not None else inputs.sampled_at
        kept = self._keep_hidden(hidden, rows, places)
        guesses = None
        if predicted is not None and filled is not None:
            num_right, last = predicted.keep_newest(filled, drafts, sampled)
            if plan.num_guesses:
                guesses = predicted.guess(filled, num_right, last, sampled, plan.num_guesses)
        return self._answer(
            plan, inputs, step, drafts, scores, prompt_scores, kept, guesses=guesses
        )

    def _logits_indices(self, inputs: StepInputs, there: Tensor) -> LogitsIndices | None:
        """The sampled tokens, which are `there` on the device; None where all tokens are sampled,
        prompts are to be scored, or all states are kept."""
        at = inputs.sampled_at
        is_all = len(at) == len(inputs.tokens) or self._predicted is not None
        if is_all or self._state.wants_prompt_logprobs[inputs.rows].any():
            return None
        slots = None if inputs.token_slots is None else inputs.token_slots[at]
        return LogitsIndices(there, self._lora(slots))

    def _keep_hidden(self, hidden: Tensor, rows: Int32s, at: Int64s) -> KeptHidden | None:
        """The hidden states `at` these places, on the device, of rows that asked for them."""
        asked = np.flatnonzero(self._state.wants_hidden[rows])
        if len(asked) == 0:
            return None
        return rows[asked], hidden[torch.from_numpy(at[asked]).to(hidden.device)]

    def _begin_drafts(self, inputs: StepInputs, drafts: Sequence[CheckedDraft]) -> None:
        """Keep what may be needed again, and prepare the sampler's tables for the positions after
        guesses."""
        if drafts:
            self._drafts.save_states(drafts)
            counted = [draft for draft in drafts if self._state.counts_tokens(draft.row)]
            if counted:
                self._state.begin_drafts(self._draft_tables(inputs, counted))

    def _draft_tables(
        self, inputs: StepInputs, drafts: Sequence[CheckedDraft]
    ) -> dict[int, DraftTables]:
        tables = table_rows_of(inputs, self._rows.spare.row)
        return {draft.row: (draft.tokens, tables[draft.samples[1:]]) for draft in drafts}

    def _fill_masks(self, inputs: StepInputs, drafts: tuple[CheckedDraft, ...]) -> None:
        """The masks of rows with a grammar: they depend on the last step's tokens, which arrive
        while this step's model computes."""
        self._pending.learn(all_of_them=True)
        tables = self._draft_tables(inputs, drafts)
        self._state.fill_masks(inputs.rows[inputs.sampling], tables)

    def _score_samples(self, logits: Tensor, tokens: Tensor, rows: Int32s) -> Scores:
        """The logprobs of all rows, if one wants more of them than the sampler gives."""
        wanted = self._state.num_logprobs(rows)
        scores = score(logits, tokens.long(), [wanted.get(i, 0) for i in range(len(rows))])
        return {index: scores[index] for index in wanted}

    def _lora(self, slots: Int64s | None, *, all_layers: bool = True) -> LoraRows | None:
        """The adapters of tokens with these slots."""
        if slots is None:
            return None
        if self._pool is None:
            raise RuntimeError(_NO_ADAPTERS)
        rows: LoraRows | None = self._decoder.kernels.lora_ops.prepare(
            slots, self._pool, self._device, all_layers=all_layers
        )
        return rows

    def _logits(self, inputs: StepInputs, hidden: Tensor, at: Int64s, there: Tensor) -> Tensor:
        """Logits after the flat tokens `at`, in ascending order and with the adapter of each;
        `there`: the same places on the device."""
        slots = None if inputs.token_slots is None else inputs.token_slots[at]
        wanted = hidden if len(at) == len(hidden) else hidden[there]
        return self._decoder.logits(wanted, self._lora(slots, all_layers=False))

    def _answer(
        self,
        plan: Plan,
        inputs: StepInputs,
        step: InFlight,
        drafts: tuple[CheckedDraft, ...] = (),
        scores: Scores | None = None,
        prompt_scores: PromptScores | None = None,
        kept: KeptHidden | None = None,
        is_graph: bool = False,
        guesses: Guesses | None = None,
    ) -> TakeResult:
        """Count a launched step's tokens; gives the function that waits for them. `scores`: those
        that the sampler did not compute."""
        picks, check = np.arange(len(step.rows)), DraftCheck(step, drafts)
        if drafts:
            picks = np.delete(picks, [sample for draft in drafts for sample in draft.samples])
            self._drafts.expect(check)
        self._pending.expect(step, picks)
        # The rows may have other owners by the time that the step is done.
        wanted = self._state.num_logprobs(step.rows)
        failures = self._state.failures_of(step.rows)
        of_requests = self._state.of_requests(step.rows)
        vocab = self._decoder.spec.vocab_size
        first_runs = self._first_runs.take()

        def answer() -> StepResult:
            sampled = step.wait()
            # Taken when a result is made and not before: a step that fails loses none.
            ends = self._mover.finished()
            given = choices.logprobs(sampled, step.at, wanted, vocab) if scores is None else scores
            right = check.num_right
            newest = check.newest(inputs.sampling_order)
            faults = {**choices.faults(step.faults, sampled.told, step.at), **failures}
            return StepResult(
                plan.step_id,
                step.tokens[newest],
                num_accepted=right,
                guesses={} if guesses is None else guesses.by_row(right),
                draft_logprobs=_draft_logprobs(drafts, right, given) if given else {},
                logprobs={Row(int(step.rows[i])): given[i] for i in newest.tolist() if i in given}
                if given
                else {},
                prompt_logprobs=prompt_scores or {},
                hidden=_hidden(kept),
                faults=tuple(
                    RowFault(Row(int(step.rows[i])), why, is_of_request=i in of_requests)
                    for i, why in faults.items()
                    if i in newest
                ),
                copies=ends.copies,
                adapters=ends.adapters,
                is_graph=is_graph,
                first_runs=first_runs,
            )

        return answer

    def _answer_without_tokens(
        self, plan: Plan, prompt_scores: PromptScores | None = None
    ) -> TakeResult:
        def answer() -> StepResult:
            ends = self._mover.finished()
            return StepResult(
                plan.step_id,
                np.empty(0, np.int32),
                prompt_logprobs=prompt_scores or {},
                copies=ends.copies,
                adapters=ends.adapters,
            )

        return answer


def _draft_logprobs(
    drafts: Sequence[CheckedDraft], right: dict[Row, int], given: Scores
) -> dict[Row, tuple[TokenLogprobs, ...]]:
    """Of the guesses that are right, where their row asked."""
    told = {}
    for draft in drafts:
        row = Row(draft.row)
        samples = draft.samples[: right[row]]
        if samples and samples[0] in given:
            told[row] = tuple(given[sample] for sample in samples)
    return told


def _hidden(kept: KeptHidden | None) -> dict[Row, Floats]:
    if kept is None:
        return {}
    rows, states = kept
    return dict(zip(map(Row, rows.tolist()), states.float().cpu().numpy(), strict=True))
