"""Speed benchmarks: ratios within one run. `make bench` runs the modules in `PARTS` and writes
docs/benchmarks.md.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# this is a separate program, not the library
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# tests/support has the Qwen vocabulary and templates
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
if "BENCHMARK_PEERS" in os.environ:  # `--peers`, also for the processes of parts
    sys.path.append(os.environ["BENCHMARK_PEERS"])
