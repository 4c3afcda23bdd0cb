"""W13: `rank_pattern` and `alpha_pattern` mean what they mean in PEFT, and can't take long."""

from __future__ import annotations

import random
import re
import time

import pytest
from peft.utils.other import get_pattern_key

from manyroots.errors import AdapterError
from manyroots.lora.files.patterns import Patterns

MODULES = [
    "lm_head", "model.embed_tokens",
    *(f"model.layers.{layer}.{leaf}" for layer in (0, 1, 2, 10, 21, 100) for leaf in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate", "mlp.gate.weight",
        "mlp.experts.7.gate_proj", "mlp.experts.down_proj", "mlp.experts.gate_up_proj",
    )),
]  # fmt: skip
NAMED = [
    "q_proj", "q.proj", "^q_proj", "proj", "_proj", "layers.1", "layers.1.mlp.up_proj",
    "model.layers.1.self_attn.q_proj", "^model.layers.1.self_attn.q_proj", "^layers.1.mlp.gate",
    "ayers.1.mlp.gate", "...proj", "^......................................", "gate", "gat.",
    "mlp.gate", "m.p.g.t.", "experts.7.gate.proj", ".q_proj", "q_proj.", "", "lm_head", "^lm.head$",
    r".*\.gate_up_proj", r"layers\.\d+\.mlp.*", r"layers\.(0|1|2)\..*_proj", r".*(q|k)_proj",
    r"(?:q|k|v)_proj", r"(?P<which>q|k)_proj", r"[qk]_proj", r"[^qk]_proj", r"[]q]_proj",
    r"[a-z\]]_proj", r"\w_proj", r"\W?q_proj", r"q\.proj", r"q\_proj", r"q_proj$", r"(^|.*)q_proj",
    r"model\.(layers\.(\d|1\d)\.)?mlp\.(gate|up)_proj", r"a|b|q_proj", r"|q_proj", r"q_proj|",
    r"(o|oo)+", r"(\w+\.)*q_proj", r".{8}", r".{3,}_proj", r".{,4}oj",
    r"q{1}_proj", r"q{_proj", r"q{}_proj", r"layers\.1{2}", r"layers.1{0,2}.mlp.gate", r".+?proj",
    r".*?", r"\Aq_proj", r"\Amodel.*q_proj\Z", r"\S+q_proj", r"(((q)))_proj", r"(q_proj)?",
    r"experts\.[0-9]+\.gate_proj", r"q_pro[jk]{1,3}", r"$", r"^", r"^$", r"q_proj^",
    r"(?i:Q)_proj", r"\bq_proj", r"q_proj\Z",
]  # fmt: skip


def theirs(keys: list[str], module: str) -> str | None:
    found = get_pattern_key(keys, module)
    return found if found in keys else None


def ours(patterns: Patterns[int], keys: list[str], module: str) -> str | None:
    index = patterns.find(module)
    return None if index is None else keys[index]


def check(keys: list[str]) -> None:
    keys = list(dict.fromkeys(keys))
    patterns = Patterns("rank_pattern", {key: index for index, key in enumerate(keys)})
    for module in MODULES:
        assert ours(patterns, keys, module) == theirs(keys, module), (keys, module)


@pytest.mark.parametrize("key", NAMED)
def test_w13_a_key_matches_the_modules_that_it_matches_in_peft(key: str) -> None:
    check([key])


def test_w13_the_first_key_that_matches_counts_whatever_kind_it_is() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        check(rng.choices(NAMED, k=rng.randint(2, 12)))


ATOMS = (r"\d", r"\w", r"\.", ".", "[a-q]", "[^.]", r"[\w.]", "^", "$", "_proj", "x", "")


def random_key(rng: random.Random, depth: int = 0, *, is_repeated: bool = False) -> str:
    """Pieces of names and signs, nested; most are valid. No repeat is inside a repeat, with which
    PEFT's own matching would never end."""
    kind = rng.randrange(10 if depth < 3 else 6)
    if kind < 3:
        module = rng.choice(MODULES)
        start = rng.randrange(len(module))
        text = module[start : start + rng.randint(1, 12)]
        return "".join(rng.choice((c, c, c, ".", re.escape(c))) for c in text)
    if kind < 6:
        return rng.choice(ATOMS)
    if is_repeated and kind in (7, 8):
        return rng.choice(ATOMS)
    if kind == 8:
        return rng.choice(ATOMS[:7]) + rng.choice(("*", "+", "?", "{,2}", "+?"))
    inner = random_key(rng, depth + 1, is_repeated=is_repeated or kind == 7)
    if kind == 7:
        return f"(?:{inner}){rng.choice(('*', '+', '?', '*?', '{2}', '{0,2}', '{1,}'))}"
    other = random_key(rng, depth + 1, is_repeated=is_repeated)
    return f"({inner}|{other})" if kind == 6 else inner + other


def test_w13_random_keys_match_what_they_match_in_peft() -> None:
    """Differential: PEFT's own function says which key counts for each module."""
    num_valid = num_matching = 0
    for seed in range(400):
        rng = random.Random(seed)
        keys = list(dict.fromkeys(random_key(rng) for _ in range(rng.randint(1, 3))))
        try:
            for key in keys:
                re.compile(rf"(.*\.)?({key})$")
        except re.error:
            with pytest.raises(AdapterError, match="not a regular expression"):
                Patterns("rank_pattern", dict.fromkeys(keys, 1))
            continue
        patterns = Patterns("rank_pattern", {key: index for index, key in enumerate(keys)})
        num_valid += 1
        for module in rng.sample(MODULES, 12):
            found = theirs(keys, module)
            assert ours(patterns, keys, module) == found, (seed, keys, module)
            num_matching += found is not None
    assert num_valid > 200
    assert num_matching > 120


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("(", "not a regular expression"),
        ("q_proj[", "not a regular expression"),
        ("*", "not a regular expression"),
        ("a{99999999999}", "not a regular expression"),
        ("q_proj)|(k_proj", "not a regular expression"),
        ("(?=q)q_proj", r"RE2 does not take .*\(\?="),
        ("(?<!x)q_proj", r"RE2 does not take .*\(\?<"),
        (r"(q|k)\1", r"RE2 does not take .*\\1"),
        ("q++_proj", r"RE2 does not take .*\+\+"),
        ("(a{1000}){1000}", "RE2 does not take .*repetition size"),
        ("((((a{50}){50}){50}){50}){50}", "RE2 does not take .*repetition size"),
        ("q+" + "x" * 3000, "more than 2000 characters"),
    ],
)
def test_w12_a_key_that_is_not_taken_is_refused_by_name(key: str, why: str) -> None:
    with pytest.raises(AdapterError, match=why) as caught:
        Patterns("alpha_pattern", {key: 1.0})
    assert "alpha_pattern" in str(caught.value)
    assert repr(key[:200]) in str(caught.value)


BOMBS = ["(a+)+b", "(a|a)*b", "(a|aa)+b", "(.*)*x", "(.*.*.*)*y", "(a?){30}a{30}b", "(\\w+\\s?)*z"]


@pytest.mark.parametrize("bomb", BOMBS)
def test_w12_keys_that_would_keep_re_busy_for_years_take_no_time(bomb: str) -> None:
    """They are matched, not refused: an automaton has no ways to try."""
    patterns = Patterns("rank_pattern", {bomb: 1})
    begin = time.thread_time()
    for length in (30, 300):
        assert patterns.find("a" * length) is None
        assert patterns.find("a." * length) is None
    assert time.thread_time() - begin < 1.0


def many_names(rng: random.Random, count: int) -> list[str]:
    return ["".join(rng.choices("ab.", k=80)) for _ in range(count)]


def test_w12_what_takes_long_over_all_modules_is_refused_before_it_does() -> None:
    """Counted, not timed: the same adapter is served or refused on every machine."""
    rng = random.Random(1)
    hostile = Patterns("rank_pattern", {f"(.*a.{{{n}}})+b{n}": 1 for n in range(50)})
    plain = {"".join(rng.choices("ab.", k=80)): n for n in range(4000)}
    shaped = Patterns("rank_pattern", plain)
    names = many_names(rng, 40_000)
    for patterns in (hostile, shaped):
        begin = time.thread_time()
        with pytest.raises(AdapterError, match="rank_pattern takes too long"):
            sum(patterns.find(name) is None for name in names)
        assert time.thread_time() - begin < 30.0


def test_twenty_thousand_modules_of_a_mixture_are_matched_quickly() -> None:
    """Of usual keys: a key for each module, as some trainers write them, and expressions."""
    modules = [
        f"model.layers.{layer}.mlp.experts.{expert}.{leaf}"
        for layer in range(48) for expert in range(128) for leaf in ("gate_proj", "up_proj")
    ]  # fmt: skip
    each = Patterns("rank_pattern", {module: n for n, module in enumerate(modules)})
    some = Patterns("rank_pattern", {r".*\.gate_proj": 8, r"layers\.(\d|1\d)\..*": 2, "q_proj": 4})
    begin = time.thread_time()
    assert [each.find(module) for module in modules] == list(range(len(modules)))
    assert {some.find(module) for module in modules} == {8, 2, None}
    assert time.thread_time() - begin < 10.0


def test_w12_a_key_that_matches_no_module_is_refused_by_name() -> None:
    patterns = Patterns("rank_pattern", {"q_proj": 1, r"k_prj": 2, r"lay.rs\.(7|8)\..*": 3})
    assert patterns.find("model.layers.0.self_attn.q_proj") == 1
    with pytest.raises(
        AdapterError, match=r"rank_pattern has 'k_prj', 'lay\.rs.*matches no module"
    ):
        patterns.refuse_unused(MODULES)
    with pytest.raises(AdapterError, match=r"rank_pattern has 'k_prj', which"):
        patterns.refuse_unused([*MODULES, "model.layers.8.mlp.up_proj"])


def test_a_key_of_a_module_that_the_adapter_leaves_alone_is_taken() -> None:
    """PEFT ignores it; it can't be a mistake that changes anything."""
    patterns = Patterns("rank_pattern", {"q_proj": 1, r"(k|v)_proj": 2})
    assert patterns.find("model.layers.0.self_attn.q_proj") == 1
    patterns.refuse_unused(MODULES)
