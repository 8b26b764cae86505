"""Random groups on the beam scheduler for as long as you like: leaks, wrong KV, wrong results.

Every run is a random engine (pool, block size, slots, budget, prefix caching, policy, scheduling
synchronous or
asynchronous) under a random load of beam and ordinary requests with aborts and preemptions, on a
worker that computes nothing but checks every KV slot; see `tests/engine/beam/simulation.py`. The
suite runs a few of these; run this for longer after a change of the scheduler.

    python benchmarks/_beam_soak.py --minutes 10
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from _common import finish, option_parser

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("runs", "failed_runs", "requests", "seconds", "groups", "steps", "rows_forked",
           "rows_preempted", "rows_recomputed", "groups_parked", "groups_failed")  # fmt: skip


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--requests", type=int, default=200, help="requests of a run")
    parser.add_argument("--first-seed", type=int, default=1_000)
    options = parser.parse_args()
    if not options.verbose:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
        logging.disable(logging.CRITICAL)
    sys.path.insert(0, str(ROOT))
    from vllm.engine.arg_utils import EngineArgs

    from tests.engine.beam.simulation import random_run
    from vllm_trie.tiny_model import model_path

    config = EngineArgs(
        model=str(model_path()), dtype="float32", enforce_eager=True, max_model_len=512
    ).create_engine_config()
    totals = dict.fromkeys(COLUMNS, 0)
    start = time.monotonic()
    seed = options.first_seed
    while time.monotonic() - start < 60 * options.minutes:
        totals["runs"] += 1
        try:
            simulation = random_run(config, seed, options.requests)
        except AssertionError as error:
            totals["failed_runs"] += 1
            print(f"seed {seed} failed: {error}", flush=True)
        else:
            totals["requests"] += len(simulation.finished)
            for name, count in asdict(simulation.scheduler.beam_counters).items():
                if name in totals:
                    totals[name] += count
        seed += 1
    totals["seconds"] = round(time.monotonic() - start)
    finish([totals], options.json, COLUMNS)
    sys.exit(1 if totals["failed_runs"] else 0)


if __name__ == "__main__":
    main()
