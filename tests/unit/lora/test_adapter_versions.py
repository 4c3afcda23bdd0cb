"""Loading, unloading and loading again while requests hold on."""

from __future__ import annotations

import pytest

from manyroots.errors import NotFoundError
from manyroots.ids import Tier
from tests.unit.lora.adapters import Adapters, content, named


def test_w04_unload_refuses_new_requests_and_lets_running_ones_finish() -> None:
    adapters = Adapters(max_loras=2)
    adapters.register("a")
    running = adapters.begin("a")
    adapters.launch(1)
    unloaded = adapters.unload("a")
    assert (unloaded.num_holds, unloaded.freed) == (1, ())
    with pytest.raises(NotFoundError, match="'a'") as caught:
        adapters.acquire("a")
    assert caught.value.field == "model"
    adapters.done(1)
    adapters.launch(2)
    assert adapters.is_ready("a")
    assert adapters.flush() == ([], [])
    adapters.done(2)
    assert adapters.end(running) == (content("a"),)
    assert named(adapters.flush()[1]) == [("a", Tier.DEVICE), ("a", Tier.HOST)]
    assert not adapters.on_device() | adapters.on_host()


def test_w04_weights_stay_in_the_slot_until_the_last_launched_step_is_done() -> None:
    """W04: an aborted request's step still runs; no other adapter gets the slot before it is
    done."""
    adapters = Adapters(max_loras=1)
    for name in "ab":
        adapters.register(name)
    running = adapters.begin("a")
    adapters.launch(1)
    adapters.launch(2)
    adapters.unload("a")
    assert adapters.end(running) == (content("a"),)
    assert named(adapters.flush()[1]) == [("a", Tier.HOST)]
    for step_id in (1, 2):
        assert adapters.prepare("b") == ["b"]
        assert adapters.flush() == ([], []), "b must wait for the steps that use the slot"
        adapters.done(step_id)
    _, drops = adapters.flush()
    assert named(drops) == [("a", Tier.DEVICE)]
    adapters.end_fetches()
    adapters.prepare("b")
    (load,), _ = adapters.flush()
    assert load.target is not None
    assert drops[0].target is not None
    assert load.target.generation > drops[0].target.generation


def test_w05_a_retracted_request_of_an_unloading_adapter_resumes_with_it() -> None:
    adapters = Adapters(max_loras=1)
    for name in "ab":
        adapters.register(name)
    request = adapters.begin("a")
    adapters.unload("a")
    adapters.residency.unseat(request)
    other = adapters.begin("b")
    adapters.end(other)
    assert adapters.prepare("a") == ["a"]
    (load,), _ = adapters.flush()
    assert (load.digest, load.source) == (content("a"), Tier.HOST)
    adapters.answer(load)
    adapters.seat(request)
    assert adapters.end(request) == (content("a"),)


def test_w06_a_name_loaded_again_before_it_drained_is_a_new_version() -> None:
    adapters = Adapters(max_loras=2)
    adapters.register("a", "old")
    before = adapters.begin("a")
    adapters.unload("a")
    registered = adapters.register("a", "new")
    after = adapters.begin("a")
    assert registered.version.serial > before.version.serial
    assert (before.digest, after.digest) == (content("old"), content("new"))
    assert before.slot != after.slot
    assert adapters.end(before) == (content("old"),)
    assert adapters.on_device() == {"new"}
    assert adapters.acquire("a").version == registered.version


def test_w06_loading_other_content_under_a_loaded_name_replaces_it() -> None:
    """W06: without an unload in between; the old version drains, or goes at once if unheld."""
    adapters = Adapters(max_loras=2)
    adapters.register("a", "1")
    request = adapters.begin("a")
    assert adapters.register("a", "2").freed == ()
    assert adapters.register("a", "3").freed == (content("2"),)
    assert adapters.acquire("a").digest == content("3")
    assert adapters.end(request) == (content("1"),)


def test_w06_the_same_content_is_shared_and_stays_while_any_version_needs_it() -> None:
    """W06, N20: the same content under a name again, or under two names, is in one place."""
    adapters = Adapters(max_loras=1)
    first = adapters.register("a", "same").version
    assert adapters.register("a", "same").version == first
    request = adapters.begin("a")
    adapters.unload("a")
    assert adapters.register("a", "same").version.serial > first.serial
    adapters.register("b", "same")
    again, other = adapters.begin("a"), adapters.begin("b")
    assert request.slot == again.slot == other.slot
    assert adapters.end(request) == ()
    assert adapters.unload("b").freed == ()
    assert adapters.end(other) == ()
    assert adapters.unload("a").num_holds == 1
    assert adapters.end(again) == (content("same"),)


def test_shared_content_is_read_where_a_loaded_version_has_it() -> None:
    adapters = Adapters(max_loras=1)
    adapters.register("a", "same")
    adapters.register("b", "same")
    hold = adapters.acquire("b")
    adapters.unload("b")  # its folder may be gone by now
    adapters.prepare("same")
    assert adapters.flush()[0][0].path == "/adapters/a"
    adapters.end(hold)


def test_w07_a_deferred_unload_leaves_a_slot_that_lru_gave_to_another() -> None:
    adapters = Adapters(max_loras=1)
    for name in "ab":
        adapters.register(name)
    adapters.bring("a")
    waiting = adapters.acquire("a")
    adapters.unload("a")
    running = adapters.begin("b")
    adapters.flush()
    assert adapters.end(waiting) == (content("a"),)
    assert named(adapters.flush()[1]) == [("a", Tier.HOST)], "no word of the slot, which is b's"
    assert running.slot == 0
    assert adapters.on_device() == {"b"}


def test_w08_an_idle_server_flushes_deferred_unloads_by_itself() -> None:
    """W08: no second call, no step: the last release is enough, and `flush` says what to do."""
    adapters = Adapters(max_loras=2)
    adapters.register("a")
    request = adapters.begin("a")
    adapters.launch(1)
    adapters.unload("a")
    adapters.end(request)
    adapters.done(1)
    assert adapters.residency.has_intents
    assert named(adapters.flush()[1]) == [("a", Tier.HOST), ("a", Tier.DEVICE)]
    assert not adapters.residency.has_intents
    assert adapters.residency.stats().num_on_host == 0


def test_n12_unloading_an_unused_adapter_frees_it_at_once() -> None:
    adapters = Adapters(max_loras=1)
    adapters.register("a")
    adapters.bring("a")
    assert adapters.unload("a").freed == (content("a"),)
    assert named(adapters.flush()[1]) == [("a", Tier.DEVICE), ("a", Tier.HOST)]


def test_unloading_what_is_not_loaded_says_so() -> None:
    adapters = Adapters(max_loras=1)
    with pytest.raises(NotFoundError, match="'a' is not loaded") as caught:
        adapters.unload("a")
    assert caught.value.field == "lora_name"
    adapters.register("a")
    hold = adapters.acquire("a")
    adapters.unload("a")
    with pytest.raises(NotFoundError):
        adapters.unload("a")
    adapters.end(hold)


def test_holds_are_released_exactly_once_and_never_from_a_seat() -> None:
    adapters = Adapters(max_loras=1)
    adapters.register("a")
    hold = adapters.begin("a")
    with pytest.raises(RuntimeError, match="ended in its seat"):
        adapters.residency.release(hold)
    adapters.end(hold)
    with pytest.raises(RuntimeError, match="released twice"):
        adapters.residency.release(hold)
    with pytest.raises(RuntimeError, match="can't be seated"):
        adapters.residency.seat(hold)
    with pytest.raises(RuntimeError, match="no seat to leave"):
        adapters.residency.unseat(hold)
