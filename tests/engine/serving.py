"""`vllm serve` as a subprocess: started, waited for, and ended with all its children."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from vllm_trie.tiny_model import model_path

MODEL_NAME = "tiny"
START_LIMIT_S = 240.0


class Server:
    """A running server; `log` grows while it runs."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = process
        self.log = log
        # Loopback only: a proxy of the environment must not see these requests.
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=120.0)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def is_healthy(self) -> bool:
        if self.process.poll() is not None:
            return False
        try:
            return self.http.get("/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_until_ready(self) -> None:
        """Raises RuntimeError with the end of the log if the server does not come up."""
        deadline = time.monotonic() + START_LIMIT_S
        while not self.is_healthy():
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"the server ended with status {self.process.returncode}; its log ends:\n"
                    + self.log_text()[-4000:]
                )
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the server did not answer within {START_LIMIT_S:g} s; its log ends:\n"
                    + self.log_text()[-4000:]
                )
            time.sleep(0.5)

    def metrics(self) -> dict[str, float]:
        """Every counter and gauge of the metrics endpoint, summed over its labels."""
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def stop(self) -> None:
        """End the server and all processes that it started."""
        self.http.close()
        for number, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def start(log: Path, *options: str, **environment: str) -> Server:
    """Start `vllm serve` on the shipped model; returns at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("vllm")),
        "serve",
        str(model_path()),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", MODEL_NAME),
        *("--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "1024", "--max-num-seqs", "8"),
        *("--kv-cache-memory-bytes", str(40 << 20)),
        *options,
    ]
    variables = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_LOG_STATS_INTERVAL": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # OMP_NUM_THREADS holds, as in all tests
        **environment,
    }
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(port, process, log)


@contextlib.contextmanager
def running(folder: Path, commands: dict[str, list[str]]) -> Iterator[dict[str, Server]]:
    """Several servers at a time, ready for requests."""
    servers: dict[str, Server] = {}
    try:
        for name, options in commands.items():
            servers[name] = start(folder / f"{name}.log", *options)
        for server in servers.values():
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers.values():
            server.stop()
