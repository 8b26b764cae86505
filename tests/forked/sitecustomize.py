"""Python runs this at its start in the tests' processes: vLLM forks where it would spawn.

A spawned process imports vLLM anew, which takes 8 s of CPU time. No process of the tests has OpenMP
threads that a fork would lose. In production vLLM spawns, as do servers with ``spawns=True``.
Collecting garbage while vLLM is imported takes a tenth of that time.
"""

import gc
import multiprocessing.context as context

gc.set_threshold(100_000, 20, 50)

context._concrete_contexts["spawn"] = context._concrete_contexts["fork"]  # type: ignore[attr-defined]
