"""A time limit for code that runs in this thread and may not end by itself."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class TimeLimitExceeded(Exception):
    """A call ran past its time limit."""


class _Interrupt(BaseException):
    """Raised inside the call that is to end; no ``Exception``, so that few handlers swallow it."""


class Watchdog:
    """Runs calls under a time limit by raising an exception in the calling thread.

    The interpreter delivers the exception between two bytecodes, so an endless loop in Python is
    ended; one inside native code is ended when it comes back. The guard thread sleeps between
    looks, so a call costs two assignments and a lock, and the limit holds to within a quarter.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._lock = threading.Lock()
        self._thread_id = 0
        self._deadline: float | None = None
        self._fired = False
        self._guard: threading.Thread | None = None

    def call(self, function: Callable[[], Result]) -> Result:
        """Return ``function()``.

        Raises:
            TimeLimitExceeded: it ran longer than ``limit_s``.
        """
        self._start_guard()
        try:
            try:
                with self._lock:
                    self._thread_id = threading.get_ident()
                    self._fired = False
                    self._deadline = time.monotonic() + self.limit_s
                return function()
            finally:
                with self._lock:
                    self._deadline = None
                    late = self._fired
                if late:
                    # The interrupt may still be on its way: take it here, where it does no harm.
                    for _ in range(100):
                        time.sleep(0.001)
                    raise _Interrupt
        except _Interrupt:
            raise TimeLimitExceeded(f"no answer within {self.limit_s:g} s") from None

    def _start_guard(self) -> None:
        if self._guard is None or not self._guard.is_alive():
            self._guard = threading.Thread(
                target=self._watch, name="vllm-trie-watchdog", daemon=True
            )
            self._guard.start()

    def _watch(self) -> None:
        while True:
            time.sleep(self.limit_s / 4)
            with self._lock:
                if self._deadline is not None and time.monotonic() > self._deadline:
                    self._deadline += self.limit_s  # once more if the call swallows this one
                    self._fired = True
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(self._thread_id), ctypes.py_object(_Interrupt)
                    )
