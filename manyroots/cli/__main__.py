"""`python -m manyroots.cli` is `manyroots`."""

import sys

from manyroots.cli.main import main

sys.exit(main())
