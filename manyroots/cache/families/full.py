"""Full attention: every earlier token is read, so any page boundary can be resumed from."""

from __future__ import annotations

from manyroots.cache.families.family import Family

FULL_ATTENTION = Family(name="full", shares_within_step=True)
