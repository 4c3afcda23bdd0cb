"""`python -m tools.docs`: write the generated files below docs/."""

from __future__ import annotations

from tools.docs.pages import GENERATED, write

changed = write()
for path in changed:
    print(f"wrote {path}")
print(f"{len(GENERATED)} generated files, {len(changed)} changed")
