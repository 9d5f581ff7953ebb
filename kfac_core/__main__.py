"""``python -m kfac_core``, the same as the command ``kfac-core``."""

import sys

from kfac_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
