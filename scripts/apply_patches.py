#!/usr/bin/env python3
"""Apply, check or reverse the patch set on the installed torchtitan (see --help)."""

import sys
from pathlib import Path

# The package need not be installed yet: this is part of installing it.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan_dmuon.patching import main

if __name__ == "__main__":
    sys.exit(main())
