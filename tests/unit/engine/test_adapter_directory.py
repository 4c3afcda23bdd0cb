"""The directory: adapters are read when first wanted, in the order of their names' messages."""

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
from tests.unit.engine.directory import Directory, digest_of, expected


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    made: list[Directory] = []

    def directory(*names: str, **settings: Any) -> Directory:
        for name in names:
            (tmp_path / name).mkdir()
            (tmp_path / name / "adapter_config.json").write_text(name)
        modules = tuple(LoraModule(name, str(tmp_path / name)) for name in names)
        made.append(Directory(tmp_path, lora_modules=modules, **settings))
        return made[-1]

    yield directory
    for directory_made in made:
        directory_made.files.gate.set()
        directory_made.loop.close()


def test_nothing_is_read_before_it_is_wanted_and_then_once(make: Any) -> None:
    directory = make("a", "b")
    assert directory.files.num_reads == {}
    requests = [directory.submit(number, "a") for number in (1, 2, 3)]
    directory.run()
    assert directory.files.num_reads == {"a": 1}
    for request in requests:
        assert directory.tokens(int(request.request_id)) == expected(request, "a")
    directory.submit(4, "a")
    directory.run()
    assert directory.files.num_reads == {"a": 1}
    assert directory.files.kept == [digest_of("a")]


def test_w10_others_decode_while_an_adapter_is_read(make: Any) -> None:
    """W10"""
    directory = make("a", "b")
    directory.files.gate.clear()
    held = directory.submit(1, "a")
    base = directory.submit(2, None)
    while directory.loop.has_work:
        directory.step()
    assert directory.tokens(2) == expected(base, None)
    assert 1 not in directory.outputs
    assert directory.loop.is_reading
    directory.files.gate.set()
    directory.run()
    assert directory.tokens(1) == expected(held, "a")


def test_w10_a_failed_read_fails_only_those_that_waited_for_it_and_can_be_retried(
    make: Any,
) -> None:
    """W10: with the reason; the other adapter's request is unharmed."""
    directory = make("a", "b")
    directory.write("a", "broken")
    directory.submit(1, "a")
    directory.submit(2, "a")
    good = directory.submit(3, "b")
    directory.run()
    for number in (1, 2):
        [output] = directory.outputs[number]
        assert output.finish_reason is FinishReason.ERROR
        assert output.error_kind is ErrorKind.REQUEST
        assert "r is 0" in str(output.error)
    assert directory.files.num_reads["a"] == 1, "those that waited read once together"
    assert directory.tokens(3) == expected(good, "b")
    directory.write("a", "mended")
    again = directory.submit(4, "a")
    directory.run()
    assert directory.tokens(4) == expected(again, "mended")


def test_a_bug_in_the_reader_is_the_engines_fault(make: Any) -> None:
    directory = make("a")
    directory.write("a", "bug")
    directory.submit(1, "a")
    directory.run()
    assert directory.outputs[1][0].error_kind is ErrorKind.ENGINE


def test_n19_an_unknown_name_is_refused_never_answered_by_the_base_model(make: Any) -> None:
    """N19"""
    directory = make("a")
    directory.submit(1, "nobody")
    directory.run()
    [output] = directory.outputs[1]
    assert output.tokens == []
    assert output.error_kind is ErrorKind.NOT_FOUND
    assert "'nobody'" in str(output.error)


def test_a_request_aborted_while_its_adapter_is_read_is_gone(make: Any) -> None:
    directory = make("a")
    directory.files.gate.clear()
    directory.submit(1, "a")
    kept = directory.submit(2, "a")
    directory.loop.handle(Abort([RequestId(1)]))
    directory.files.gate.set()
    directory.run()
    [output] = directory.outputs[1]
    assert output.finish_reason is FinishReason.ABORT
    assert directory.tokens(2) == expected(kept, "a")


def test_an_abort_looks_at_no_other_message(make: Any) -> None:
    """Counted in lines that run: 40 adapters are read, 40 requests wait for each, and the last of
    all leaves."""
    directory = make(*(f"a{number}" for number in range(40)))
    directory.files.gate.clear()
    numbers = range(1, 1601)
    for number in numbers:
        directory.submit(number, f"a{number % 40}")
    num_lines = 0

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        assert directory.loop.preparation.abort(RequestId(1600))
    finally:
        sys.settrace(before)
    assert 0 < num_lines < 30
    directory.loop.handle(Abort([RequestId(number) for number in numbers[:-1]]))
    directory.files.gate.set()
    directory.run()
    assert not directory.loop.preparation.waiting
    ends = [directory.outputs[number][-1].finish_reason for number in numbers]
    assert ends == [FinishReason.ABORT] * 1600


def test_s03_a_load_says_what_was_loaded(make: Any, tmp_path: Path) -> None:
    """S03"""
    directory = make(lora_dirs=(str(tmp_path),))
    path = directory.write("new")
    directory.load(7, "new", "new")
    directory.run()
    reply = directory.replies[7]
    assert (reply.error, reply.rank, reply.num_bytes) == (None, 8, 1000)
    assert reply.digest == digest_of("new").hex()
    assert reply.modules == ("q_proj",)
    assert reply.path == path
    request = directory.submit(1, "new")
    directory.run()
    assert directory.tokens(1) == expected(request, "new")


@pytest.mark.parametrize("name", ["base", "a/../b", "/a", "a//b", "", "..", "x" * 129, "tab\t"])
def test_s03_a_name_that_cannot_be_an_adapters_is_refused(make: Any, name: str) -> None:
    """S03"""
    directory = make("a")
    directory.load(1, name, directory.write("b"))
    directory.run()
    assert directory.replies[1].error_kind is ErrorKind.REQUEST
    assert directory.replies[1].error
    assert directory.files.num_reads == {}


def test_s03_a_duplicate_name_is_refused_unless_in_place(make: Any) -> None:
    """S03: the same content in place changes nothing."""
    directory = make("a")
    directory.load(1, "a", directory.write("b"))
    directory.load(2, "a", directory.write("b"), in_place=True)
    directory.run()
    assert "load_inplace" in str(directory.replies[1].error)
    assert directory.replies[2].error is None
    assert not directory.replies[2].is_unchanged
    directory.load(3, "a", directory.write("elsewhere", "b"), in_place=True)
    directory.run()
    assert directory.replies[3].is_unchanged
    request = directory.submit(1, "a")
    directory.run()
    assert directory.tokens(1) == expected(request, "b")


def test_s03_only_folders_below_lora_dirs_may_be_loaded(make: Any, tmp_path: Path) -> None:
    """S03: neither by `..` nor by a link; what lies outside looks the same, there or not."""
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    directory = make("outside", lora_dirs=(str(allowed),))
    (allowed / "link").symlink_to(tmp_path / "outside")
    (allowed / "loop").symlink_to(allowed / "loop")
    (allowed / "file").write_text("x")
    outside = [
        str(tmp_path / "outside"), str(allowed / ".." / "outside"), "../outside", "link",
        str(tmp_path / "nowhere"),
    ]  # fmt: skip
    paths = [*outside, "loop", "nowhere", "", "a\0b", "file", "x" * 5000]
    for op_id, path in enumerate(paths):
        directory.load(op_id, f"n{op_id}", path)
    directory.run()
    errors = [directory.replies[op_id] for op_id in range(len(paths))]
    assert all(reply.error_kind is ErrorKind.REQUEST for reply in errors)
    assert all("--lora-dirs" in str(reply.error) for reply in errors[: len(outside)])
    assert directory.files.num_reads == {}


def test_a_failed_load_leaves_what_the_name_meant(make: Any) -> None:
    directory = make("a")
    directory.submit(1, "a")
    directory.run()
    bad = directory.write("bad", "broken")
    directory.load(1, "a", bad, in_place=True)
    directory.load(2, "new", bad)
    directory.run()
    assert "r is 0" in str(directory.replies[1].error)
    assert "r is 0" in str(directory.replies[2].error)
    request = directory.submit(2, "a")
    directory.submit(3, "new")
    directory.run()
    assert directory.tokens(2) == expected(request, "a")
    assert directory.outputs[3][0].error_kind is ErrorKind.NOT_FOUND


def test_s03_a_read_that_ends_during_a_step_is_told_after_that_step(make: Any) -> None:
    directory = make()
    path = directory.write("late")
    directory.submit(1, None)
    directory.step()
    directory.files.gate.clear()
    directory.load(7, "late", path)
    waits = directory.submit(2, "late")
    directory.step()
    assert not directory.loop.take_replies()
    directory.files.gate.set()
    directory.loop.wait_for_read()
    [reply] = directory.loop.take_replies()
    assert (reply.op_id, reply.error) == (7, None)
    directory.run()
    assert directory.tokens(2) == expected(waits, "late")


def test_w04_unloading_lets_running_requests_finish_and_refuses_new_ones(make: Any) -> None:
    """W04: and the reply says that it drains, what it freed and what not."""
    directory = make("a")
    first = directory.submit(1, "a")
    while not directory.outputs.get(1):
        if not directory.loop.has_work:
            directory.loop.wait_for_read()
        directory.step()
    directory.unload(1, "a")
    directory.submit(2, "a")
    directory.run()
    assert directory.replies[1].num_requests == 1
    assert directory.replies[1].num_bytes == 0
    assert directory.tokens(1) == expected(first, "a")
    assert directory.outputs[2][0].error_kind is ErrorKind.NOT_FOUND
    assert directory.scheduler.stats().num_cached_pages == 0
    assert directory.residency.stats().num_on_device == 0


def test_s03_the_reply_to_an_unload_says_what_was_freed(make: Any) -> None:
    """S03"""
    directory = make("a")
    directory.submit(1, "a")
    directory.run()
    cached = directory.scheduler.stats().num_cached_pages
    assert cached > 0
    directory.unload(1, "a")
    directory.run()
    reply = directory.replies[1]
    assert (reply.num_pages, reply.num_bytes, reply.num_requests) == (cached, 1000, 0)
    directory.unload(2, "a")
    directory.run()
    assert directory.replies[2].error_kind is ErrorKind.NOT_FOUND


def test_w08_an_idle_engine_flushes_deferred_unloads_by_itself(make: Any) -> None:
    """W08: after the last request of an unloaded adapter no message is needed to free it."""
    directory = make("a")
    directory.submit(1, "a")
    directory.run()
    directory.unload(1, "a")
    assert directory.loop.has_work
    directory.run()
    assert not directory.residency.has_intents
    stats = directory.residency.stats()
    assert (stats.num_loaded, stats.num_on_device, stats.num_on_host) == (0, 0, 0)


def test_an_unread_name_is_unloaded_at_once(make: Any) -> None:
    directory = make("a")
    directory.unload(1, "a")
    directory.run()
    assert directory.replies[1].error is None
    directory.submit(1, "a")
    directory.run()
    assert directory.outputs[1][0].error_kind is ErrorKind.NOT_FOUND


def test_an_unload_while_reading_comes_after_those_that_waited(make: Any) -> None:
    """W04: a request that was accepted is answered; one that came after the unload is not."""
    directory = make("a")
    directory.files.gate.clear()
    before = directory.submit(1, "a")
    directory.unload(1, "a")
    directory.submit(2, "a")
    directory.load(2, "a", directory.write("b"))
    after = directory.submit(3, "a")
    directory.files.gate.set()
    directory.run()
    assert directory.replies[1].error is None
    assert directory.replies[2].error is None
    assert directory.tokens(1) == expected(before, "a")
    assert directory.outputs[2][0].error_kind is ErrorKind.NOT_FOUND
    assert directory.tokens(3) == expected(after, "b")


def test_w06_a_name_loaded_again_while_the_old_one_drains(make: Any) -> None:
    """W06, N20: old requests keep the old weights, new ones have the new, and none mixes them."""
    directory = make("a")
    old = directory.submit(1, "a")
    while not directory.outputs.get(1):
        if not directory.loop.has_work:
            directory.loop.wait_for_read()
        directory.step()
    directory.unload(1, "a")
    directory.load(2, "a", directory.write("b"))
    new = directory.submit(2, "a")
    directory.run()
    assert directory.tokens(1) == expected(old, "a")
    assert directory.tokens(2) == expected(new, "b")


def test_requests_are_not_held_up_by_a_reload_of_their_adapter(make: Any) -> None:
    directory = make("a")
    directory.submit(1, "a")
    directory.run()
    directory.files.gate.clear()
    directory.load(1, "a", directory.write("b"), in_place=True)
    during = directory.submit(2, "a")
    while directory.loop.has_work:
        directory.step()
    assert directory.tokens(2) == expected(during, "a")
    directory.files.gate.set()
    directory.run()
    after = directory.submit(3, "a")
    directory.run()
    assert directory.tokens(3) == expected(after, "b")


def test_s03_a_pinned_adapter_keeps_its_slot_and_never_the_last_one(make: Any) -> None:
    """S03: pinning"""
    directory = make("a", "b", "c", max_loras=2)
    directory.load(1, "kept", directory.write("kept"), is_pinned=True)
    directory.run()
    assert directory.residency.stats().num_on_device == 1, "a pinned adapter is brought at once"
    for number, name in enumerate("abcab"):
        directory.submit(number + 1, name)
        directory.run()
    assert directory.directory.where("kept") is Tier.DEVICE
    directory.load(2, "too-many", directory.write("d"), is_pinned=True)
    directory.run()
    assert "--max-loras" in str(directory.replies[2].error)
    directory.unload(3, "kept")
    directory.load(4, "too-many", directory.write("d"), is_pinned=True)
    directory.run()
    assert directory.replies[4].error is None


def test_w20_first_news_says_where_the_adapter_was(make: Any) -> None:
    """W20"""
    directory = make("a", "b", max_loras=1)
    for number, name in enumerate(["a", "a", "b", "a"]):
        directory.submit(number, name)
        directory.run()
    directory.submit(9, None)
    directory.run()
    was = {
        number: [o.adapter_was for o in outputs] for number, outputs in directory.outputs.items()
    }
    assert [was[number][0] for number in range(4)] == [
        Tier.STORAGE, Tier.DEVICE, Tier.STORAGE, Tier.HOST,
    ]  # fmt: skip
    assert was[9][0] is None
    assert all(place is None for places in was.values() for place in places[1:])


def test_loads_are_timed_by_where_they_came_from(make: Any) -> None:
    """W20"""
    directory = make("a", "b", max_loras=1)
    for number, name in enumerate(["a", "b", "a"]):
        directory.submit(number, name)
        directory.run()
    directory.write("bad", "broken")
    directory.load(1, "bad", str(directory.folder / "bad"))
    directory.run()
    kinds = [(load.source, load.target, load.is_good) for load in directory.loads]
    read, load = (Tier.STORAGE, Tier.HOST, True), (Tier.HOST, Tier.DEVICE, True)
    assert kinds == [read, load, read, load, load, (Tier.STORAGE, Tier.HOST, False)]
    assert all(load.seconds >= 0 for load in directory.loads)


def test_a_name_noted_twice_must_mean_the_same_folder(make: Any) -> None:
    directory = make("a")
    directory.loop.note_adapter(LoraModule("a", str(directory.folder / "a")))
    directory.loop.note_adapter(LoraModule("a", ""))
    with pytest.raises(RequestError, match="another folder"):
        directory.loop.note_adapter(LoraModule("a", directory.write("b")))
    with pytest.raises(RequestError, match="in which folder"):
        directory.loop.note_adapter(LoraModule("c", ""))
    with pytest.raises(RequestError, match="base model"):
        directory.loop.note_adapter(LoraModule("base", directory.write("b")))
