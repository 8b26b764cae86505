"""Python runs this at its start in the tests' processes: vLLM forks where it would spawn.

A spawned process imports vLLM anew, which takes 8 s of CPU time. No process of the tests has OpenMP
threads that a fork would lose. In production vLLM spawns, as do servers with ``spawns=True``.

vLLM's modules are no garbage, but to look for it takes a tenth of the time in which they are
imported, and 1 to 2 s of each start, which does so eight times.
"""

import gc
import multiprocessing.context as context
import sys

context._concrete_contexts["spawn"] = context._concrete_contexts["fork"]  # type: ignore[attr-defined]

gc.set_threshold(100_000, 20, 50)
_collect = gc.collect


def _collect_for_others(generation: int = 2) -> int:
    """Collect garbage, but not for vLLM."""
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return 0 if caller.startswith("vllm.") else _collect(generation)


gc.collect = _collect_for_others
