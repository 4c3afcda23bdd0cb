"""What crosses between the server's processes arrives as it was sent."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from manyroots.distributed.arrays import flatten, restore
from manyroots.engine.wire import (
    NUM_KEPT,
    MessageKind,
    SubmitReader,
    SubmitWriter,
    decode,
    encode,
)
from manyroots.ids import RequestId
from manyroots.messages import Batch, FinishReason, Output, Stats, StepOutputs, Submit, Tokens
from manyroots.sampling import SamplingParams


def test_a_prompt_crosses_as_four_bytes_a_token() -> None:
    submit = Submit(RequestId(5), [1, 2, 150_000], "tenant", SamplingParams(), 7, (2,), None)
    frames = SubmitWriter().encode(submit)
    assert len(frames[2]) == 12
    body = SubmitReader().decode(frames)
    assert body.prompt == array("i", [1, 2, 150_000])
    assert (body.request_id, body.salt, body.stop_ids) == (5, "tenant", (2,))


def test_r03_what_the_sequences_of_a_request_share_crosses_once_and_is_one_object() -> None:
    """R03: a million token ids for 256 prompts took an engine 1.9 GB."""
    asked = SamplingParams(allowed_token_ids=tuple(range(100_000)), bad_words=("no",))
    sent = [Submit(RequestId(i), [1], None, asked, 7, (2,), None) for i in range(40)]
    others = [SamplingParams(seed=i) for i in range(NUM_KEPT)]
    sent += [Submit(RequestId(50 + i), [1], None, other, 7, (2,), None)
             for i, other in enumerate(others)]  # fmt: skip
    sent.append(Submit(RequestId(99), [3], None, asked, 7, (2,), None, max_tokens=5))
    writer, reader = SubmitWriter(), SubmitReader()
    frames = [writer.encode(submit) for submit in sent]
    assert sum(len(b"".join(one)) for one in frames[1:40]) < 39 * 600
    got = [reader.decode(one) for one in frames]
    assert got == [replace(submit, prompt=array("i", submit.prompt)) for submit in sent]
    assert len({id(submit.sampling) for submit in got[:40]}) == 1


def test_news_cross_as_columns_and_read_as_outputs() -> None:
    columns = (np.array([4, 2**40]), np.array([7, 8], np.int32), np.array([0, 16], np.int32))
    ended = Output(RequestId(3), [9], FinishReason.STOP, 0, stop_token=9)
    stats = Stats(*range(11))
    kind, body = decode(
        encode(MessageKind.BATCH, Batch(StepOutputs([ended], Tokens(*columns)), stats))
    )
    assert kind is MessageKind.BATCH
    assert body.stats == stats
    assert len(body.outputs) == 3
    assert list(body.outputs) == [
        Output(RequestId(4), [7], None, 0),
        Output(RequestId(2**40), [8], None, 16),
        ended,
    ]


def test_what_has_no_form_on_the_wire_is_refused() -> None:
    with pytest.raises(TypeError, match="complex can't cross"):
        encode(MessageKind.FAILED, 1j)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.bool_])
def test_an_array_crosses_with_its_type_whatever_the_annotation_looks_like(dtype: type) -> None:
    """numpy 2.5 gives arrays' annotations as aliases, which equal nothing: a server hung by it."""
    sent: Any = np.array([0, 1, 5], dtype)
    there = restore(Any, flatten(sent))
    assert there.dtype == sent.dtype
    assert there.tolist() == sent.tolist()


def test_an_array_of_a_type_that_no_message_has_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="ndarray float32 can't cross"):
        flatten(np.zeros(3, np.float32))
