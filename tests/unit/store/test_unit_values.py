"""Values in storage: whole, or not there."""

from __future__ import annotations

import random

from manyroots.store.unit_values import HEADER_BYTES, pack, unit_key, unpack

KEY = unit_key(b"h" * 32, 0, 0, 1)


def test_t03_every_flipped_bit_is_found() -> None:
    """T03: 10,000 bits anywhere in a value, header included."""
    rng = random.Random(3)
    unit = rng.randbytes(4096)
    value = pack(KEY, unit)
    assert unpack(KEY, value, len(unit)) == unit
    for bit in rng.sample(range(8 * len(value)), 10_000):
        damaged = bytearray(value)
        damaged[bit // 8] ^= 1 << bit % 8
        assert unpack(KEY, damaged, len(unit)) is None, f"bit {bit}"


def test_t03_what_is_cut_longer_or_of_another_key_is_no_value() -> None:
    """T03: of every length."""
    unit = bytes(range(100))
    value = pack(KEY, unit)
    for length in range(len(value)):
        assert unpack(KEY, value[:length], len(unit)) is None
    assert unpack(KEY, value + b"\0", len(unit)) is None
    assert unpack(unit_key(b"h" * 32, 1, 0, 1), value, len(unit)) is None
    assert unpack(KEY, value, len(unit) - 1) is None
    assert len(value) == HEADER_BYTES + len(unit)
