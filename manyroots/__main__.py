"""`python -m manyroots` is the command, for where the package was not installed."""

import sys

from manyroots.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
