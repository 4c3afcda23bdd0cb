"""The desk: adapters are read when first wanted, in the order of their names' messages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyroots.adapter_names import LoraModule
from manyroots.errors import RequestError
from manyroots.ids import RequestId, Tier
from manyroots.messages import Abort, ErrorKind, FinishReason
from tests.unit.engine.desk import Desk, digest_of, expected


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    made: list[Desk] = []

    def desk(*names: str, **settings: Any) -> Desk:
        for name in names:
            (tmp_path / name).mkdir()
            (tmp_path / name / "adapter_config.json").write_text(name)
        modules = tuple(LoraModule(name, str(tmp_path / name)) for name in names)
        made.append(Desk(tmp_path, lora_modules=modules, **settings))
        return made[-1]

    yield desk
    for desk_made in made:
        desk_made.files.gate.set()
        desk_made.loop.close()


def test_nothing_is_read_before_it_is_wanted_and_then_once(make: Any) -> None:
    desk = make("a", "b")
    assert desk.files.num_reads == {}
    requests = [desk.submit(number, "a") for number in (1, 2, 3)]
    desk.run()
    assert desk.files.num_reads == {"a": 1}
    for request in requests:
        assert desk.tokens(int(request.request_id)) == expected(request, "a")
    desk.submit(4, "a")
    desk.run()
    assert desk.files.num_reads == {"a": 1}
    assert desk.files.kept == [digest_of("a")]


def test_w10_others_decode_while_an_adapter_is_read(make: Any) -> None:
    """W10"""
    desk = make("a", "b")
    desk.files.gate.clear()
    held = desk.submit(1, "a")
    base = desk.submit(2, None)
    while desk.loop.has_work:
        desk.step()
    assert desk.tokens(2) == expected(base, None)
    assert 1 not in desk.outputs
    assert desk.loop.is_reading
    desk.files.gate.set()
    desk.run()
    assert desk.tokens(1) == expected(held, "a")


def test_w10_a_failed_read_fails_only_those_that_waited_for_it_and_can_be_retried(
    make: Any,
) -> None:
    """W10: with the reason; the other adapter's request is unharmed."""
    desk = make("a", "b")
    desk.write("a", "broken")
    desk.submit(1, "a")
    desk.submit(2, "a")
    good = desk.submit(3, "b")
    desk.run()
    for number in (1, 2):
        [output] = desk.outputs[number]
        assert output.finish_reason is FinishReason.ERROR
        assert output.error_kind is ErrorKind.REQUEST
        assert "r is 0" in str(output.error)
    assert desk.files.num_reads["a"] == 1, "those that waited read once together"
    assert desk.tokens(3) == expected(good, "b")
    desk.write("a", "mended")
    again = desk.submit(4, "a")
    desk.run()
    assert desk.tokens(4) == expected(again, "mended")


def test_a_bug_in_the_reader_is_the_engines_fault(make: Any) -> None:
    desk = make("a")
    desk.write("a", "bug")
    desk.submit(1, "a")
    desk.run()
    assert desk.outputs[1][0].error_kind is ErrorKind.ENGINE


def test_n19_an_unknown_name_is_refused_never_answered_by_the_base_model(make: Any) -> None:
    """N19"""
    desk = make("a")
    desk.submit(1, "nobody")
    desk.run()
    [output] = desk.outputs[1]
    assert output.tokens == []
    assert output.error_kind is ErrorKind.NOT_FOUND
    assert "'nobody'" in str(output.error)


def test_a_request_aborted_while_its_adapter_is_read_is_gone(make: Any) -> None:
    desk = make("a")
    desk.files.gate.clear()
    desk.submit(1, "a")
    kept = desk.submit(2, "a")
    desk.loop.handle(Abort([RequestId(1)]))
    desk.files.gate.set()
    desk.run()
    [output] = desk.outputs[1]
    assert output.finish_reason is FinishReason.ABORT
    assert desk.tokens(2) == expected(kept, "a")


def test_an_abort_looks_at_no_other_message(make: Any) -> None:
    """Counted in lines that run: 40 adapters are read, 40 requests wait for each, and the last of
    all leaves."""
    desk = make(*(f"a{number}" for number in range(40)))
    desk.files.gate.clear()
    numbers = range(1, 1601)
    for number in numbers:
        desk.submit(number, f"a{number % 40}")
    num_lines = 0

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        assert desk.loop._desk.abort(RequestId(1600))
    finally:
        sys.settrace(before)
    assert 0 < num_lines < 30
    desk.loop.handle(Abort([RequestId(number) for number in numbers[:-1]]))
    desk.files.gate.set()
    desk.run()
    assert not desk.loop._desk._where
    ends = [desk.outputs[number][-1].finish_reason for number in numbers]
    assert ends == [FinishReason.ABORT] * 1600


def test_s03_a_load_says_what_was_loaded(make: Any, tmp_path: Path) -> None:
    """S03"""
    desk = make(lora_dirs=(str(tmp_path),))
    path = desk.write("new")
    desk.load(7, "new", "new")
    desk.run()
    reply = desk.replies[7]
    assert (reply.error, reply.rank, reply.num_bytes) == (None, 8, 1000)
    assert reply.digest == digest_of("new").hex()
    assert reply.modules == ("q_proj",)
    assert reply.path == path
    request = desk.submit(1, "new")
    desk.run()
    assert desk.tokens(1) == expected(request, "new")


@pytest.mark.parametrize("name", ["base", "a/b", "", "..", "x" * 129, "tab\t"])
def test_s03_a_name_that_cannot_be_an_adapters_is_refused(make: Any, name: str) -> None:
    """S03"""
    desk = make("a")
    desk.load(1, name, desk.write("b"))
    desk.run()
    assert desk.replies[1].error_kind is ErrorKind.REQUEST
    assert desk.replies[1].error
    assert desk.files.num_reads == {}


def test_s03_a_duplicate_name_is_refused_unless_in_place(make: Any) -> None:
    """S03: the same content in place changes nothing."""
    desk = make("a")
    desk.load(1, "a", desk.write("b"))
    desk.load(2, "a", desk.write("b"), in_place=True)
    desk.run()
    assert "load_inplace" in str(desk.replies[1].error)
    assert desk.replies[2].error is None
    assert not desk.replies[2].is_unchanged
    desk.load(3, "a", desk.write("elsewhere", "b"), in_place=True)
    desk.run()
    assert desk.replies[3].is_unchanged
    request = desk.submit(1, "a")
    desk.run()
    assert desk.tokens(1) == expected(request, "b")


def test_s03_only_folders_below_lora_dirs_may_be_loaded(make: Any, tmp_path: Path) -> None:
    """S03: neither by `..` nor by a link; what lies outside looks the same, there or not."""
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    desk = make("outside", lora_dirs=(str(allowed),))
    (allowed / "link").symlink_to(tmp_path / "outside")
    (allowed / "loop").symlink_to(allowed / "loop")
    (allowed / "file").write_text("x")
    outside = [
        str(tmp_path / "outside"), str(allowed / ".." / "outside"), "../outside", "link",
        str(tmp_path / "nowhere"),
    ]  # fmt: skip
    paths = [*outside, "loop", "nowhere", "", "a\0b", "file", "x" * 5000]
    for op_id, path in enumerate(paths):
        desk.load(op_id, f"n{op_id}", path)
    desk.run()
    errors = [desk.replies[op_id] for op_id in range(len(paths))]
    assert all(reply.error_kind is ErrorKind.REQUEST for reply in errors)
    assert all("--lora-dirs" in str(reply.error) for reply in errors[: len(outside)])
    assert desk.files.num_reads == {}


def test_a_failed_load_leaves_what_the_name_meant(make: Any) -> None:
    desk = make("a")
    desk.submit(1, "a")
    desk.run()
    bad = desk.write("bad", "broken")
    desk.load(1, "a", bad, in_place=True)
    desk.load(2, "new", bad)
    desk.run()
    assert "r is 0" in str(desk.replies[1].error)
    assert "r is 0" in str(desk.replies[2].error)
    request = desk.submit(2, "a")
    desk.submit(3, "new")
    desk.run()
    assert desk.tokens(2) == expected(request, "a")
    assert desk.outputs[3][0].error_kind is ErrorKind.NOT_FOUND


def test_w04_unloading_lets_running_requests_finish_and_refuses_new_ones(make: Any) -> None:
    """W04: and the reply says that it drains, what it freed and what not."""
    desk = make("a")
    first = desk.submit(1, "a")
    while not desk.outputs.get(1):
        if not desk.loop.has_work:
            desk.loop.wait_for_read()
        desk.step()
    desk.unload(1, "a")
    desk.submit(2, "a")
    desk.run()
    assert desk.replies[1].num_requests == 1
    assert desk.replies[1].num_bytes == 0
    assert desk.tokens(1) == expected(first, "a")
    assert desk.outputs[2][0].error_kind is ErrorKind.NOT_FOUND
    assert desk.scheduler.stats().num_cached_pages == 0
    assert desk.residency.stats().num_on_device == 0


def test_s03_the_reply_to_an_unload_says_what_was_freed(make: Any) -> None:
    """S03"""
    desk = make("a")
    desk.submit(1, "a")
    desk.run()
    cached = desk.scheduler.stats().num_cached_pages
    assert cached > 0
    desk.unload(1, "a")
    desk.run()
    reply = desk.replies[1]
    assert (reply.num_pages, reply.num_bytes, reply.num_requests) == (cached, 1000, 0)
    desk.unload(2, "a")
    desk.run()
    assert desk.replies[2].error_kind is ErrorKind.NOT_FOUND


def test_w08_an_idle_engine_flushes_deferred_unloads_by_itself(make: Any) -> None:
    """W08: after the last request of an unloaded adapter no message is needed to free it."""
    desk = make("a")
    desk.submit(1, "a")
    desk.run()
    desk.unload(1, "a")
    assert desk.loop.has_work
    desk.run()
    assert not desk.residency.has_intents
    stats = desk.residency.stats()
    assert (stats.num_loaded, stats.num_on_device, stats.num_on_host) == (0, 0, 0)


def test_an_unread_name_is_unloaded_at_once(make: Any) -> None:
    desk = make("a")
    desk.unload(1, "a")
    desk.run()
    assert desk.replies[1].error is None
    desk.submit(1, "a")
    desk.run()
    assert desk.outputs[1][0].error_kind is ErrorKind.NOT_FOUND


def test_an_unload_while_reading_comes_after_those_that_waited(make: Any) -> None:
    """W04: a request that was accepted is answered; one that came after the unload is not."""
    desk = make("a")
    desk.files.gate.clear()
    before = desk.submit(1, "a")
    desk.unload(1, "a")
    desk.submit(2, "a")
    desk.load(2, "a", desk.write("b"))
    after = desk.submit(3, "a")
    desk.files.gate.set()
    desk.run()
    assert desk.replies[1].error is None
    assert desk.replies[2].error is None
    assert desk.tokens(1) == expected(before, "a")
    assert desk.outputs[2][0].error_kind is ErrorKind.NOT_FOUND
    assert desk.tokens(3) == expected(after, "b")


def test_w06_a_name_loaded_again_while_the_old_one_drains(make: Any) -> None:
    """W06, N20: old requests keep the old weights, new ones have the new, nobody mixes."""
    desk = make("a")
    old = desk.submit(1, "a")
    while not desk.outputs.get(1):
        if not desk.loop.has_work:
            desk.loop.wait_for_read()
        desk.step()
    desk.unload(1, "a")
    desk.load(2, "a", desk.write("b"))
    new = desk.submit(2, "a")
    desk.run()
    assert desk.tokens(1) == expected(old, "a")
    assert desk.tokens(2) == expected(new, "b")


def test_requests_are_not_held_up_by_a_reload_of_their_adapter(make: Any) -> None:
    desk = make("a")
    desk.submit(1, "a")
    desk.run()
    desk.files.gate.clear()
    desk.load(1, "a", desk.write("b"), in_place=True)
    during = desk.submit(2, "a")
    while desk.loop.has_work:
        desk.step()
    assert desk.tokens(2) == expected(during, "a")
    desk.files.gate.set()
    desk.run()
    after = desk.submit(3, "a")
    desk.run()
    assert desk.tokens(3) == expected(after, "b")


def test_s03_a_pinned_adapter_keeps_its_slot_and_never_the_last_one(make: Any) -> None:
    """S03: pinning"""
    desk = make("a", "b", "c", max_loras=2)
    desk.load(1, "kept", desk.write("kept"), is_pinned=True)
    desk.run()
    assert desk.residency.stats().num_on_device == 1, "a pinned adapter is brought at once"
    for number, name in enumerate("abcab"):
        desk.submit(number + 1, name)
        desk.run()
    assert desk.desk.where("kept") is Tier.DEVICE
    desk.load(2, "too many", desk.write("d"), is_pinned=True)
    desk.run()
    assert "--max-loras" in str(desk.replies[2].error)
    desk.unload(3, "kept")
    desk.load(4, "too many", desk.write("d"), is_pinned=True)
    desk.run()
    assert desk.replies[4].error is None


def test_w20_first_news_says_where_the_adapter_was(make: Any) -> None:
    """W20"""
    desk = make("a", "b", max_loras=1)
    for number, name in enumerate(["a", "a", "b", "a"]):
        desk.submit(number, name)
        desk.run()
    desk.submit(9, None)
    desk.run()
    was = {number: [o.adapter_was for o in outputs] for number, outputs in desk.outputs.items()}
    assert [was[number][0] for number in range(4)] == [
        Tier.STORAGE, Tier.DEVICE, Tier.STORAGE, Tier.HOST,
    ]  # fmt: skip
    assert was[9][0] is None
    assert all(place is None for places in was.values() for place in places[1:])


def test_loads_are_timed_by_where_they_came_from(make: Any) -> None:
    """W20"""
    desk = make("a", "b", max_loras=1)
    for number, name in enumerate(["a", "b", "a"]):
        desk.submit(number, name)
        desk.run()
    desk.write("bad", "broken")
    desk.load(1, "bad", str(desk.folder / "bad"))
    desk.run()
    kinds = [(load.source, load.target, load.is_good) for load in desk.loads]
    read, load = (Tier.STORAGE, Tier.HOST, True), (Tier.HOST, Tier.DEVICE, True)
    assert kinds == [read, load, read, load, load, (Tier.STORAGE, Tier.HOST, False)]
    assert all(load.seconds >= 0 for load in desk.loads)


def test_a_name_noted_twice_must_mean_the_same_folder(make: Any) -> None:
    desk = make("a")
    desk.loop.note_adapter(LoraModule("a", str(desk.folder / "a")))
    desk.loop.note_adapter(LoraModule("a", ""))
    with pytest.raises(RequestError, match="another folder"):
        desk.loop.note_adapter(LoraModule("a", desk.write("b")))
    with pytest.raises(RequestError, match="in which folder"):
        desk.loop.note_adapter(LoraModule("c", ""))
    with pytest.raises(RequestError, match="base model"):
        desk.loop.note_adapter(LoraModule("base", desk.write("b")))
