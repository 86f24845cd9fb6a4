"""`python -m plume` is the command line."""

import sys

from plume.cli import main

sys.exit(main())
