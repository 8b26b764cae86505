"""Shared parts of the benchmarks; the commands are the files in the folder above."""

from __future__ import annotations

import sys
from pathlib import Path

# `python benchmarks/NAME.py` finds this package next to the script; `tests`, which some
# prompts come from, is at the root of the repository.
sys.path.append(str(Path(__file__).parents[2]))
