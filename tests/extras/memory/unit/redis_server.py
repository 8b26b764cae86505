"""A real server on loopback, which tests stop, fill and lie through."""

from __future__ import annotations

import atexit
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest


class RedisServer:
    """A `redis-server` or `valkey-server` of its own, without files.

    Raises:
        pytest.skip.Exception: Neither is installed, or its client is not.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        pytest.importorskip("redis", reason="the package redis is not installed")
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            pytest.skip("neither redis-server nor valkey-server is installed")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self._command += ["--dir", str(folder), *options]
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.kill)  # also after a failed test
        self.start()

    @property
    def client(self) -> Any:
        from redis import Redis

        return Redis(port=self.port, protocol=2)

    def start(self) -> None:
        """Start it, empty."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                time.sleep(0.02)
        raise RuntimeError(f"{self._command} does not listen")

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
