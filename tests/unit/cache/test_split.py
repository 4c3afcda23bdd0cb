"""How one memory is split over families of layers (F09)."""

from __future__ import annotations

import itertools

import pytest

from manyroots.cache.families.attention import attention_families
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.families.window import SlidingWindow
from manyroots.cache.split import (
    SHORT,
    Demand,
    FamilyBytes,
    largest_shares,
    longest_that_fits,
    split,
    told,
)
from manyroots.errors import ConfigError

LAYER_PAGE = 4096


def demand(max_model_len: int = 32768, step: int = 2048, chunk: int | None = None) -> Demand:
    return Demand(
        page_size=16,
        max_model_len=max_model_len,
        num_step_tokens=step,
        num_chunk_tokens=chunk or step,
    )


def sizes(layers: dict[int | None, int], wanted: Demand) -> list[FamilyBytes]:
    """Families by their windows, with so many layers each."""
    families = attention_families(
        [*layers], page_size=wanted.page_size, max_model_len=wanted.max_model_len
    )
    return [FamilyBytes(f, n * LAYER_PAGE) for f, n in zip(families, layers.values(), strict=True)]


def units(layers: dict[int | None, int], num_bytes: int, wanted: Demand) -> list[int]:
    found = split(sizes(layers, wanted), num_bytes, wanted)
    return [capacity.num_device_units for capacity in found]


GEMMA = {None: 1, 512: 5}
GPT_OSS = {None: 18, 128: 18}
TWO_WINDOWS = {None: 2, 128: 3, 1024: 5}


@pytest.mark.parametrize("num_bytes", [2**31, 2**31 + 12345, 123456789])
def test_f09_one_family_gets_everything(num_bytes: int) -> None:
    """F09: as before there was anything to split, whether it sees everything or a window."""
    for window in (None, 512, 4096):
        wanted = demand(max_model_len=1000)
        assert units({window: 16}, num_bytes, wanted) == [num_bytes // (16 * LAYER_PAGE)]


@pytest.mark.parametrize("layers", [GEMMA, GPT_OSS, TWO_WINDOWS, {128: 1, 4096: 7}])
@pytest.mark.parametrize("num_bytes", [3 * 2**28, 2**33, 2**36])
def test_f09_all_memory_is_given_away_and_no_more(
    layers: dict[int | None, int], num_bytes: int
) -> None:
    wanted = demand()
    given = units(layers, num_bytes, wanted)
    sizes_ = [size.unit_bytes for size in sizes(layers, wanted)]
    used = sum(n * size for n, size in zip(given, sizes_, strict=True))
    assert num_bytes - sum(sizes_) < used <= num_bytes


@pytest.mark.parametrize("layers", [GEMMA, GPT_OSS, TWO_WINDOWS, {128: 1, 4096: 7}])
def test_f09_requests_of_any_length_fit_at_least_half_as_often_as_if_split_for_them(
    layers: dict[int | None, int],
) -> None:
    """F09: whichever family runs out first, the memory that requests of one length hold then is
    at least the promised share of all, which is above a half with two families."""
    wanted = demand()
    families = sizes(layers, wanted)
    num_bytes = 2**36
    given = units(layers, num_bytes, wanted)
    weights = largest_shares([s.unit_bytes for s in families], [s.family for s in families], wanted)
    promised = 1 / float(sum(weights))
    assert promised > 1 / len(layers)
    for num_tokens in (SHORT, 1500, 2048, 4096, 10_000, 20_000, 32768):
        needs = [wanted.units(s.family, num_tokens, 1) for s in families]
        count = min(n // need for n, need in zip(given, needs, strict=True))
        one = sum(need * s.unit_bytes for need, s in zip(needs, families, strict=True))
        # A step's tokens are set aside, which is little of so much.
        assert count * one >= promised * num_bytes * 0.98


def test_f09_a_window_that_no_sequence_outgrows_sees_everything() -> None:
    """F09: such layers keep every page, since none would ever be given back."""
    found = attention_families([None, 4096, 128], page_size=16, max_model_len=4096)
    assert found == (
        FULL_ATTENTION,
        type(FULL_ATTENTION)("full-2"),
        SlidingWindow("window-128", 128, 16),
    )
    names = [f.name for f in attention_families([64, 64], page_size=16, max_model_len=4096)]
    assert names == ["window-64", "window-64-2"]
    wanted = demand(max_model_len=4096)
    assert len({*units({None: 3, 4096: 3}, 2**31, wanted)}) == 1


def test_f09_windows_alone_hold_any_length() -> None:
    """F09: where no layer sees everything, the length of a request is no matter of memory."""
    wanted = demand(max_model_len=10**6)
    one = wanted.least(SlidingWindow("w", 512, 16))
    assert one == (511 + 2048 - 2) // 16 + 2
    assert units({512: 16}, one * 16 * LAYER_PAGE, wanted) == [one]
    assert longest_that_fits(sizes({512: 16}, wanted), one * 16 * LAYER_PAGE, wanted) == 10**6


@pytest.mark.parametrize("layers", [GEMMA, GPT_OSS, TWO_WINDOWS])
def test_f09_one_request_of_the_full_length_always_fits(layers: dict[int | None, int]) -> None:
    """F09: with just enough memory for one, each family gets just what that one takes; with a byte
    less the flags are named that would help."""
    wanted = demand()
    families = sizes(layers, wanted)
    least = [wanted.least(s.family) for s in families]
    num_bytes = sum(n * s.unit_bytes for n, s in zip(least, families, strict=True))
    assert units(layers, num_bytes, wanted) == least
    with pytest.raises(ConfigError, match=r"--max-model-len or --max-num-batched-tokens"):
        units(layers, num_bytes - 1, wanted)
    for more in (1, 2, 5, 20):
        given = units(layers, num_bytes * more, wanted)
        assert all(n >= one for n, one in zip(given, least, strict=True))


def test_f09_the_longest_request_that_fits_does_and_a_page_more_does_not() -> None:
    """F09: what a context is cut to where memory is short of the model's own length."""
    for layers, num_bytes in itertools.product((GEMMA, GPT_OSS), (2**20, 2**22, 2**24)):
        wanted = demand(max_model_len=100_000)
        longest = longest_that_fits(sizes(layers, wanted), num_bytes, wanted)
        assert 0 < longest < 100_000
        assert longest % 16 == 0
        units(layers, num_bytes, demand(max_model_len=longest))
        with pytest.raises(ConfigError):
            units(layers, num_bytes, demand(max_model_len=longest + 1))
    full = demand(max_model_len=100_000)
    assert longest_that_fits(sizes({None: 1}, full), 100 * LAYER_PAGE, full) == 1600
    assert longest_that_fits(sizes(GEMMA, full), 1000, full) == 0


def test_f09_a_chunk_is_what_one_request_computes_in_a_step() -> None:
    """F09: a window's least room is its pages and a chunk's, which a threshold makes smaller."""
    window = SlidingWindow("w", 512, 16)
    assert demand(chunk=None).least(window) - demand(chunk=256).least(window) == (2048 - 256) // 16
    assert demand(max_model_len=100).least(window) == 7


def test_f09_what_each_family_got_is_told() -> None:
    """F09: in pages, tokens, GiB and requests of the full length."""
    wanted = demand()
    families = sizes(GEMMA, wanted)
    full, window = told(split(families, 2**32, wanted), families, wanted)
    assert full.startswith("full: ")
    assert window.startswith("window-512: ")
    for line in (full, window):
        assert "pages" in line
        assert "GiB" in line
        assert "requests of 32768 tokens" in line
