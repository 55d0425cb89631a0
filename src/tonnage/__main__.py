"""``python -m tonnage`` is the ``tonnage`` command."""

from __future__ import annotations

import sys

from tonnage.cli import main

if __name__ == "__main__":
    sys.exit(main())
