"""The modules of benchmarks/ are imported by name here, as its scripts do."""

import sys
from pathlib import Path

_BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
if _BENCHMARKS not in sys.path:
    sys.path.insert(0, _BENCHMARKS)
