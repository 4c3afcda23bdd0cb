"""Which pages of a window are worth keeping: those before places where requests go on."""

from __future__ import annotations

import numpy as np
import pytest

from manyroots.cache.audit import audit
from manyroots.cache.cache import PrefixCache
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.families.window import SlidingWindow
from manyroots.cache.fork_share import START
from manyroots.cache.keys import PrefixKey
from manyroots.cache.next_turns import MEMORY, NextTurns
from manyroots.cache.outcomes import Ending, Refusal
from manyroots.cache.planes import CacheLayout, Capacity
from manyroots.cache.policies import CachePolicies
from manyroots.ids import Namespace, StepId

KEY = PrefixKey(Namespace(adapter=None, salt=None))
PAGE, WINDOW = 4, 9
TAIL = 2
"""Pages that a window of 9 tokens needs before a boundary; one more is kept."""
Tokens = list[int]


class Talks:
    """A cache with room for all pages of full attention, and few of a window; audited."""

    def __init__(self, num_window_pages: int, *, has_full: bool = True) -> None:
        window = Capacity(SlidingWindow("window", WINDOW, PAGE), num_window_pages)
        full = (Capacity(FULL_ATTENTION, 2000),) if has_full else ()
        self.cache = PrefixCache(CacheLayout.of(PAGE, (*full, window)), CachePolicies())
        self.step = 0
        self.next_token = 1000

    def fresh(self, num_tokens: int) -> Tokens:
        self.next_token += num_tokens
        return list(range(self.next_token - num_tokens, self.next_token))

    def ask(self, prompt: Tokens, answer: Tokens, *, chunk: int = 8) -> int:
        """Serve a prompt and its answer; gives how many tokens of the prompt were found."""
        cache, tokens = self.cache, np.array(prompt + answer, np.int32)
        lease = cache.claim(KEY, tokens[: len(prompt)], len(prompt), True)
        found = computed = lease.num_cached_tokens
        cache.begin(lease, len(prompt))
        while computed < len(tokens):
            self.step += 1
            step = StepId(self.step)
            left = len(prompt) - computed
            end = computed + (min(chunk, left) if left > 0 else 1)
            assert not isinstance(cache.extend(lease, computed, end, step), Refusal)
            known = tokens[: max(len(prompt), end)]
            if left > 0:
                cache.announce(lease, known, end, step)
            cache.commit_step(step)
            cache.commit(lease, known, end, step)
            computed = end
        cache.release(lease, Ending.FINISHED)
        audit(cache)
        return found

    def found(self, tokens: Tokens) -> int:
        """Whole pages before the last token that could be reused."""
        return self.cache.lookup(KEY, np.array([*tokens, 7], np.int32)).num_pages * PAGE


def pages(num_tokens: int) -> int:
    return num_tokens // PAGE * PAGE


@pytest.mark.parametrize("has_full", [True, False])
def test_p07_the_end_of_a_talk_outlives_the_middle_of_a_newer_one(has_full: bool) -> None:
    """P07: ten talks, in a pool that holds four of them whole, or of all the ends of the prompt
    and of the answer."""
    talks = Talks(10 * 2 * (TAIL + 1) + 8, has_full=has_full)
    said = [talks.fresh(80) for _ in range(10)]
    for talk in said:
        assert talks.ask(talk[:70], talk[70:]) == 0
    assert [talks.found(talk) for talk in said] == [80] * 10


def test_p07_a_talk_whose_window_moved_on_goes_on_from_its_newest_end() -> None:
    """P07: round after round, each talk's pages but the newest were given back while it ran, and
    all others ran since."""
    talks = Talks(6 * 2 * (TAIL + 1) + 8)
    said = [talks.fresh(30) for _ in range(6)]
    for _ in range(5):
        for number, before in enumerate(said):
            prompt = before + talks.fresh(9)
            found = talks.ask(prompt, answer := talks.fresh(6))
            assert found == (pages(len(before)) if len(before) > 30 else 0)
            said[number] = prompt + answer


def test_p07_a_prompt_that_parts_a_little_before_the_end_finds_the_boundary_before() -> None:
    """P07: the next request of a conversation may replace the last tokens of what was said."""
    talks = Talks(TAIL + 1 + 8)
    talk = talks.fresh(80)
    talks.ask(talk[:70], talk[70:])
    talks.ask(talks.fresh(60), [])  # takes all that can be spared
    talks.ask(talks.fresh(12), [])
    assert talks.found([*talk[:78], 1, 2]) == 76


def test_p07_where_prompts_have_parted_they_will_again() -> None:
    """P07: a head that two requests had in common stays, whatever follows it once."""
    talks = Talks(30)
    head = talks.fresh(40)
    for _ in range(2):
        talks.ask(head + talks.fresh(10), [])
    for _ in range(8):
        talks.ask(talks.fresh(50), [])
    assert talks.ask(head + talks.fresh(10), []) == 40


def test_p07_a_prompt_that_parts_where_none_has_finds_it_while_there_is_room() -> None:
    """P07: nothing is evicted while there is room."""
    talks = Talks(100)
    talk = talks.fresh(80)
    talks.ask(talk, [])
    assert talks.ask(talk[:44] + talks.fresh(10), []) == 44


def test_p07_going_on_at_the_end_is_no_use_of_what_was_passed() -> None:
    """P07: talks that leave their thoughts out part from themselves at every turn. Of all those
    places only the newest of each talk will be needed again, and there is room for little more,
    but for the share of forks."""
    talks = Talks(round((4 * 2 * (TAIL + 1) + 8) / (1 - START)))
    said = [talks.fresh(30) for _ in range(4)]
    for turn in range(12):
        for number, prompt in enumerate(said):
            found = talks.ask(prompt, talks.fresh(16))
            assert found == (pages(len(prompt) - 20) if turn else 0)
            said[number] = prompt + talks.fresh(20)


def test_p07_it_is_learned_whether_talks_go_on_behind_answers_or_behind_prompts() -> None:
    """P07: with the thoughts left out, ends of answers are worth nothing, and ends of prompts are
    kept instead."""
    turns = [Talks(4 * (TAIL + 1) + 8) for _ in range(2)]
    for leaves_out, talks in zip((False, True), turns, strict=True):
        said = [talks.fresh(30) for _ in range(4)]
        for _ in range(20):
            for number, prompt in enumerate(said):
                answer = talks.fresh(30)
                talks.ask(prompt, answer)
                said[number] = (prompt if leaves_out else prompt + answer) + talks.fresh(8)
                if len(said[number]) > 300:
                    said[number] = talks.fresh(30)
        learned = talks.cache.next_turns
        assert learned.keeps_prompts is leaves_out
        assert learned.keeps_answers is not leaves_out


def test_what_is_learned_of_talks_is_forgotten_in_time() -> None:
    turns, talks = NextTurns(), Talks(50)
    talk = talks.fresh(40)
    talks.ask(talk[:22], talk[22:])
    [leaf] = [node for node in talks.cache.index.tree.nodes() if not node.children]
    assert (leaf.prompt_end, leaf.end) == (5, 10)
    for _ in range(10 * MEMORY):
        turns.parted(leaf, 10)
    assert (turns.keeps_answers, turns.keeps_prompts) == (True, False)
    assert turns.version == 1
    for _ in range(MEMORY):
        turns.parted(leaf, 5)
    assert (turns.keeps_answers, turns.keeps_prompts) == (True, True)
    turns.parted(leaf, 7)  # in the middle of the answer: neither
    for _ in range(10 * MEMORY):
        turns.parted(leaf, 4)  # a little before the end of the prompt
    assert (turns.keeps_answers, turns.keeps_prompts) == (False, True)
