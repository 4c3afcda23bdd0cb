from __future__ import annotations

import pytest

from manyroots.text.tokenizer import Tokenizer
from tests.unit.text.tiny_tokenizer import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()
