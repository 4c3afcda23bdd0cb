"""`python -m tests.soaks.oracle_soak --rules N`: the cache against a dictionary, for as long as
is asked (R02).

Runs walks seed after seed until that many rules were checked. A walk that fails is told as the code
that replays it, made as short as it can be. Needs nothing but numpy; `tests.soaks.slices`
has the other options: processes, and a file to go on from.
"""

from __future__ import annotations

import logging
import sys

from manyroots.cache.quick_audit import WHOLE_EVERY
from tests.property.cache_oracle import Walk
from tests.soaks.slices import command


def run_seed(seed: int) -> tuple[dict[str, int], str | None]:
    """One walk: counts, and what was wrong."""
    walk = Walk.of(seed)
    logging.disable()  # storage that is made to fail says so
    try:
        ran = walk.run(WHOLE_EVERY).ran
    except Exception as error:
        return {}, f"{type(error).__name__}: {error}\n{walk.shortest()}"
    return {"rules": sum(ran.values()), **{name: ran[name] for name in sorted(ran)}}, None


def main(argv: list[str] | None = None) -> int:
    what = "tests.soaks.oracle_soak"
    return command(what, run_seed, "rules", description=__doc__, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
