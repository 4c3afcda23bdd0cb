"""`python -m tools.docs`: write the generated files below docs/."""

from __future__ import annotations

from tools.docs.pages import QUICK, SLOW, write

changed = write(QUICK | SLOW)
for path in changed:
    print(f"wrote {path}")
print(f"{len(QUICK | SLOW)} generated files, {len(changed)} changed")
