"""Serving on a virtual clock: an engine in this process whose time is the CPU time of its steps.

Other processes on the machine take CPU time from a server and not from this clock, so latencies
can be compared where a server's would say who else was busy. The front end's own processes, the
network and the client are left out.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

_THINK_SECONDS = 0.003
"""From the end of a request to its client's next one, at a fixed concurrency."""


class VirtualLoad:
    """Requests to one engine, and when they got their tokens."""

    def __init__(self, llm: Any, inputs: Sequence[Any], params: Any) -> None:
        self._engine = llm.llm_engine
        self._params = params
        self._waiting = list(reversed(inputs))
        self._arrivals: list[tuple[float, int, Any]] = []
        self._numbers = count()
        self._arrived: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self.ttft: list[float] = []
        self.tpot: list[float] = []
        self.num_steps = 0
        self.seconds = 0.0

    def run(self, concurrency: int | None, rate: float | None) -> dict[str, float]:
        """Serve all prompts, that many at a time or that many a second; return the results under
        the names of serving.py."""
        rng = random.Random(0)
        if concurrency is not None:
            for _ in range(min(concurrency, len(self._waiting))):
                self._arrive(0.0)
        else:
            assert rate is not None
            at = 0.0
            while self._waiting:
                self._arrive(at)
                at += rng.expovariate(rate)
        total = 0
        while self._arrivals or self._arrived:
            if not self._arrived:
                self.seconds = max(self.seconds, self._arrivals[0][0])
            self._admit()
            start = time.process_time()
            outputs = self._engine.step()
            self.seconds += time.process_time() - start
            self.num_steps += 1
            for output in outputs:
                total += self._take(output, closed=concurrency is not None)
        return {
            "ttft_mean_ms": 1e3 * float(np.mean(self.ttft)),
            "ttft_p99_ms": 1e3 * float(np.quantile(self.ttft, 0.99)),
            "tpot_p50_ms": 1e3 * float(np.quantile(self.tpot, 0.5)),
            "tpot_p99_ms": 1e3 * float(np.quantile(self.tpot, 0.99)),
            "tokens_per_s": total / self.seconds,
            "steps": float(self.num_steps),
        }

    def _arrive(self, at: float) -> None:
        if self._waiting:
            heapq.heappush(self._arrivals, (at, next(self._numbers), self._waiting.pop()))

    def _admit(self) -> None:
        """Hand over the requests that have arrived."""
        while self._arrivals and self._arrivals[0][0] <= self.seconds:
            at, number, prompt = heapq.heappop(self._arrivals)
            name = f"serving-{number}"
            self._engine.add_request(name, prompt, self._params)
            self._arrived[name] = at
            self._tokens[name] = 0

    def _take(self, output: Any, closed: bool) -> int:
        """Note a request's new tokens; return their number."""
        name, new = output.request_id, len(output.outputs[0].token_ids)
        if new and not self._tokens[name]:
            self._first[name] = self.seconds
            self.ttft.append(self.seconds - self._arrived[name])
        self._tokens[name] += new
        if output.finished:
            spent = self.seconds - self._first.pop(name)
            self.tpot.append(spent / max(self._tokens.pop(name) - 1, 1))
            del self._arrived[name]
            if closed:
                self._arrive(self.seconds + _THINK_SECONDS)
        return new
