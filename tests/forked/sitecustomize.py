"""Python runs this at its start in the tests' processes: vLLM forks where it would spawn.

A spawned process imports vLLM anew, which takes 8 s of CPU time. No process of the tests has OpenMP
threads that a fork would lose. In production vLLM spawns, as do servers with ``spawns=True``.
"""

import multiprocessing.context as context

context._concrete_contexts["spawn"] = context._concrete_contexts["fork"]  # type: ignore[attr-defined]
