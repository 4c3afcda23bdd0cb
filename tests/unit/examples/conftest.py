"""Scripts in `examples/` find their neighbours because Python puts a script's folder first."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
