"""How much the kills and outages inject: a sample in `make test-all`, everything in `make faults`."""

import os

FULL = os.environ.get("TOOLROLL_FAULTS") == "full"
