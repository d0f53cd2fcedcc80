#!/usr/bin/env python3
"""Apply, check or reverse the patch set on the installed torchtitan (see --help)."""

import sys

from torchtitan_dmuon.patching import main

if __name__ == "__main__":
    sys.exit(main())
