"""`python -m forge_ugc`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
