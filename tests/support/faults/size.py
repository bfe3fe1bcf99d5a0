"""How much the fault suite injects: a sample in `make test-all`, everything in `make faults`."""

import os

FULL = os.environ.get("TOOLROLL_FAULTS") == "full"
