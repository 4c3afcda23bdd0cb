"""`allowed_token_ids` and `bad_words`, end to end: beside what a bias says of the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from manyroots import LLM, SamplingParams, StructuredOutputsParams
from manyroots.errors import RequestError
from tests.unit.models.tiny import save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

VOCAB, EOS = 300, 257
PROMPT = [3, 4, 5]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("rules")
    save_tiny(folder, "llama", vocab_size=VOCAB, eos_token_id=EOS)
    tiny_backend().save(str(folder / "tokenizer.json"))
    with LLM(str(folder), dtype="float32", max_model_len=128, max_num_seqs=16) as made:
        yield made


def said(llm: LLM, *asked: SamplingParams, prompt: list[int] = PROMPT) -> list[list[int]]:
    results = llm.generate([prompt] * len(asked), list(asked))
    return [list(result.outputs[0].token_ids) for result in results]


def test_allowed_token_ids_are_a_bias_of_all_others_away(llm: LLM) -> None:
    """The same draws: what a bias of -100 leaves is no whole unit of a weight here."""
    some = tuple(range(40, 90))
    away = {token: -100.0 for token in range(VOCAB) if token not in some}
    asked = [
        SamplingParams(max_tokens=12, temperature=heat, seed=seed, top_p=share, **how)
        for seed, (heat, share) in enumerate(((0.0, 1.0), (1.0, 1.0), (1.0, 0.7), (2.0, 1.0)))
        for how in ({"allowed_token_ids": some}, {"logit_bias": away})
    ]
    answers = said(llm, *asked)
    assert answers[::2] == answers[1::2]
    assert {token for answer in answers for token in answer} <= set(some)
    assert len(set(map(tuple, answers))) > 2


def test_the_end_is_only_allowed_by_name(llm: LLM) -> None:
    wants = {"temperature": 1.0, "max_tokens": 20, "seed": 1}
    without, with_end, early = said(
        llm,
        SamplingParams(allowed_token_ids=(50, 51), **wants),  # type: ignore[arg-type]
        SamplingParams(allowed_token_ids=(50, EOS), **wants),  # type: ignore[arg-type]
        SamplingParams(allowed_token_ids=(50, EOS), min_tokens=9, **wants),  # type: ignore[arg-type]
    )
    assert len(without) == 20
    assert set(without) == {50, 51}
    assert with_end[-1] == EOS
    assert len(with_end) < 20
    assert early[:9] == [50] * 9


def test_bad_words_are_never_said_and_nothing_else_is_forbidden(llm: LLM) -> None:
    """Token by token beside biases: of a word's tokens only the last, after all others."""
    [free] = said(llm, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    tokenizer = llm.get_tokenizer()
    for length in (1, 2, 3):
        at = next(
            place for place in range(len(free) - length)
            if all(33 <= token < 127 for token in free[place : place + length])
        )  # fmt: skip
        bad = free[at : at + length]
        word = tokenizer.decode(bad)
        assert tokenizer.encode(word, add_special_tokens=False) == bad
        [answer] = said(
            llm, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, bad_words=(word,))
        )
        spoken: list[int] = []
        for _ in range(24):
            ends = spoken[len(spoken) - length + 1 :] == bad[:-1]
            bias = {bad[-1]: -100.0} if ends else {}
            [[token]] = said(
                llm,
                SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logit_bias=bias),
                prompt=[*PROMPT, *spoken],
            )
            spoken.append(token)
        assert answer == spoken != free
        assert word not in tokenizer.decode(answer)


def test_rules_and_a_shape_hold_together(llm: LLM) -> None:
    shape = StructuredOutputsParams(regex="[ab]{6}")
    [answer] = said(
        llm, SamplingParams(max_tokens=20, seed=2, structured_outputs=shape, bad_words=("aa", "bb"))
    )
    assert bytes(answer[:6]) in (b"ababab", b"bababa")


def test_who_can_never_choose_is_refused_by_name(llm: LLM) -> None:
    for values, field in (
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (VOCAB,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (97,), "bad_words": ("a",)}, "allowed_token_ids"),
        ({"allowed_token_ids": (EOS,), "min_tokens": 1}, "allowed_token_ids"),
        ({"bad_words": (" \n",)}, "bad_words"),
        ({"bad_words": ("",)}, "bad_words"),
        ({"bad_words": "word"}, "bad_words"),
    ):
        with pytest.raises(RequestError, match=field) as caught:
            llm.generate([PROMPT], SamplingParams(**values))
        assert caught.value.field == field
    # After the first token only: that request fails, and no other.
    stuck = SamplingParams(max_tokens=5, allowed_token_ids=(97,), bad_words=("aa",))
    with pytest.raises(RequestError, match="leave no token") as caught:
        llm.generate([PROMPT, PROMPT], [stuck, SamplingParams(max_tokens=5, ignore_eos=True)])
    assert caught.value.field == "allowed_token_ids"
    assert len(said(llm, SamplingParams(max_tokens=5, ignore_eos=True))[0]) == 5
