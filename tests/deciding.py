"""A small engine without a model, audited after every step; shared by tests of the decide half."""

from __future__ import annotations

from concurrent.futures import Future

from manyroots.cache.audit import audit
from manyroots.cache.cache import PrefixCache
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.config import SchedulerSettings
from manyroots.engine.loop import EngineLoop
from manyroots.ids import Namespace, RequestId
from manyroots.messages import Output, Submit
from manyroots.runner.fake import FakeRunner, fake_next_token
from manyroots.sampling import SamplingParams
from manyroots.scheduler.scheduler import Scheduler
from manyroots.step import Plan, StepResult

BASE = Namespace(adapter=None, salt=None)
VOCAB = 50


def submit(
    number: int,
    prompt: list[int],
    *,
    max_tokens: int = 4,
    min_tokens: int = 0,
    stop_ids: tuple[int, ...] = (),
    namespace: Namespace = BASE,
) -> Submit:
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, temperature=0)
    return Submit(RequestId(number), prompt, namespace, sampling, number, stop_ids)


def expected_tokens(request: Submit) -> list[int]:
    """What the request gives alone, without any cache, scheduler or batch."""
    history = list(request.prompt)
    output: list[int] = []
    assert request.sampling.max_tokens is not None
    while len(output) < request.sampling.max_tokens:
        token = fake_next_token(history, VOCAB)
        if token in request.stop_ids and len(output) < request.sampling.min_tokens:
            token = (token + 1) % VOCAB
        output.append(token)
        history.append(token)
        if token in request.stop_ids and len(output) > request.sampling.min_tokens:
            break
    return output


class _Watched:
    """A runner that checks every plan against the step's limits before passing it on."""

    def __init__(self, runner: FakeRunner, settings: SchedulerSettings) -> None:
        self._runner = runner
        self._settings = settings

    def launch(self, plan: Plan) -> Future[StepResult]:
        assert 0 < plan.total_tokens <= self._settings.max_num_batched_tokens
        assert len(set(plan.rows.tolist())) == len(plan.rows) <= self._settings.max_num_seqs
        assert plan.num_tokens.min() > 0
        return self._runner.launch(plan)

    def close(self) -> None:
        self._runner.close()


class Deciding:
    """Scheduler, cache and fake runner wired as in the engine."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        max_num_seqs: int = 8,
        budget: int = 32,
        chunk: int | None = None,
        depth: int = 1,
        reuse: bool = True,
    ) -> None:
        settings = SchedulerSettings(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=chunk,
        )
        self.cache = PrefixCache(FULL_ATTENTION, num_pages, page_size, reuse=reuse)
        self.runner = FakeRunner(num_pages=num_pages, page_size=page_size, vocab_size=VOCAB)
        self.scheduler = Scheduler(settings, self.cache, max_model_len=num_pages * page_size)
        self.loop = EngineLoop(self.scheduler, _Watched(self.runner, settings), depth=depth)
        self.outputs: dict[int, list[Output]] = {}

    def step(self) -> None:
        for output in self.loop.step():
            self.outputs.setdefault(int(output.request_id), []).append(output)
        audit(self.cache)

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.loop.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def tokens(self, number: int) -> list[int]:
        return [token for output in self.outputs[number] for token in output.tokens]

    def last(self, number: int) -> Output:
        return self.outputs[number][-1]
