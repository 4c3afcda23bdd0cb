"""What crosses between ranks arrives as it was sent."""

from __future__ import annotations

import dataclasses
import socket
import threading

import numpy as np
import pytest

from manyroots.config import engine_settings
from manyroots.distributed.channel import Channel, ClosedError
from manyroots.distributed.wire import Join, RankMessageKind, _Plan, decode, encode
from manyroots.ids import AdapterDigest, AdapterSlot, CopyId, RequestId, Row, StepId, Tier
from manyroots.sampling import SamplingParams
from manyroots.step import (
    Arrival,
    Copy,
    DropAdapter,
    KeepStored,
    LoadAdapter,
    LoadId,
    NewPages,
    Plan,
    SlotRef,
)
from tests.helpers.patience import PATIENCE_S


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def full_plan() -> Plan:
    arrival = Arrival(
        Row(3),
        RequestId(9),
        tokens=ints(5, 6, 7),
        num_prompt_tokens=2,
        num_computed_tokens=1,
        page_tables=(ints(4, 2), ints()),
        sampling=SamplingParams(temperature=0.5, logit_bias={4: -1.5}, stop=("x",)),
        seed=2**64 - 1,
        stop_ids=(1, 2),
        adapter_slot=AdapterSlot(1),
        adapter_from=2,
    )
    target = SlotRef(AdapterSlot(1), 7)
    digest = AdapterDigest(bytes(range(32)))
    return Plan(
        StepId(4),
        (arrival,),
        (NewPages(0, rows=ints(3), places=ints(2), pages=ints(8)),),
        rows=ints(3, 1),
        num_tokens=ints(2, 1),
        samples=np.array([True, False]),
        copies=(Copy(CopyId(1), 0, Tier.HOST, Tier.DEVICE, ints(1), ints(2), (b"h",)),),
        keeps=(KeepStored(bytes(64), 59.5),),
        adapters=(
            LoadAdapter(LoadId(5), digest, Tier.STORAGE, target, "/adapters/a", 1 << 40),
            DropAdapter(digest, Tier.HOST),
            DropAdapter(digest, Tier.DEVICE, target),
        ),
        waits=True,
        lent_units=(3, 5),
    )


def same(left: object, right: object) -> bool:
    if isinstance(left, np.ndarray):
        assert isinstance(right, np.ndarray)
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, tuple):
        assert isinstance(right, tuple)
        return len(left) == len(right) and all(map(same, left, right))
    if dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left)]
        return type(left) is type(right) and all(
            same(getattr(left, name), getattr(right, name)) for name in names
        )
    return left == right


def test_a_plan_crosses_whole() -> None:
    plan = full_plan()
    kind, arrived = decode(encode(RankMessageKind.PLAN, plan))
    assert kind is RankMessageKind.PLAN
    assert same(plan, arrived)


def test_every_field_of_a_plan_has_a_place_on_the_wire() -> None:
    names = [field.name for field in dataclasses.fields(Plan)]
    assert [field.name for field in dataclasses.fields(_Plan)] == names


def test_settings_cross_whole() -> None:
    join = Join(1, 2, "/tmp/x", engine_settings({"model": "m", "block_size": 32}))
    assert decode(encode(RankMessageKind.JOIN, join)) == (RankMessageKind.JOIN, join)


def test_an_array_of_another_dtype_is_refused_where_it_is_sent() -> None:
    plan = dataclasses.replace(full_plan(), rows=np.zeros(2, np.float64))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="float64"):
        encode(RankMessageKind.PLAN, plan)


def test_large_messages_arrive_whole_and_in_order() -> None:
    here, there = (Channel(end) for end in socket.socketpair())
    sent = [(b"k", bytes([n]) * (n * 700_001)) for n in range(4)]
    thread = threading.Thread(target=lambda: [here.send(*message) for message in sent])
    thread.start()
    assert [there.receive() for _ in sent] == sent
    thread.join()


def test_the_other_sides_end_is_noticed_by_sender_and_receiver() -> None:
    here, there = (Channel(end) for end in socket.socketpair())
    there.close()
    with pytest.raises(ClosedError):
        here.receive()
    with pytest.raises(ClosedError):
        here.send(b"k", b"body")


def test_closing_wakes_ones_own_receiver() -> None:
    here, there = (Channel(end) for end in socket.socketpair())
    ended = threading.Event()

    def receive() -> None:
        with pytest.raises(ClosedError):
            here.receive()
        ended.set()

    threading.Thread(target=receive, daemon=True).start()
    here.close()
    assert ended.wait(PATIENCE_S)
    there.close()
