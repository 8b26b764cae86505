"""`vllm serve` as a subprocess: start it, wait for it, end it with all its children."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from tests.processes import end, environment, one_at_a_time, wait_for
from vllm_trie.lab.tiny_model import model_path

MODEL_NAME = "tiny"
WORKER_IN_ENGINE = ("--distributed-executor-backend", "uni")
"""With `IN_ENGINE`: the worker runs in the engine's process."""
IN_ENGINE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Without this, vLLM's CPU platform overrules the option; servers have an engine process anyway."""
NOT_COMPILED = {"TORCH_COMPILE_DISABLE": "1"}
"""vLLM compiles the ranks of logprobs at the first request for some, also if it is to be eager."""


class Server:
    """A running server; `log` grows while it runs."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = process
        self.log = log
        # Loopback only: a proxy of the environment must not see these requests.
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=120.0)

    def client(self) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(trust_env=False, timeout=120.0)
        url = f"{self.url}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http)

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
        """Wait while the server makes progress; raise RuntimeError if it does not come up."""
        wait_for(self.is_healthy, self.process, self.log)

    def metrics(self) -> dict[str, float]:
        """Return each counter and gauge of the metrics endpoint, summed over its labels."""
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def stop(self) -> None:
        """End the server and all processes that it started."""
        self.http.close()
        end(self.process)


def start(
    log: Path,
    *options: str,
    model: str = "",
    worker_process: bool = True,
    spawns: bool = False,
    **variables: str,
) -> Server:
    """Start `vllm serve` without waiting for it; arguments as for :func:`running`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("vllm")),
        "serve",
        model or str(model_path()),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", MODEL_NAME),
        *("--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "1024", "--max-num-seqs", "8"),
        *("--kv-cache-memory-bytes", str(40 << 20)),
        *(() if worker_process else WORKER_IN_ENGINE),
        *options,
    ]
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        **({} if worker_process else IN_ENGINE),
        **({} if spawns else NOT_COMPILED),
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_LOG_STATS_INTERVAL": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # OMP_NUM_THREADS holds, as in all tests
        **variables,
    }
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            env=environment(spawns, **variables),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(port, process, log)


@contextlib.contextmanager
def running(
    log: Path, *options: str, worker_process: bool = False, spawns: bool = False, **variables: str
) -> Iterator[Server]:
    """Run a server that is ready for requests; no other test starts one in the meantime.

    Args:
        log: the file that the server logs to.
        options: of `vllm serve`.
        worker_process: whether the worker has a process of its own, vLLM's default.
        spawns, variables: see :func:`tests.processes.environment`.
    """
    with one_at_a_time():
        server = start(log, *options, worker_process=worker_process, spawns=spawns, **variables)
        try:
            server.wait_until_ready()
        except BaseException:
            server.stop()
            raise
    try:
        yield server
    finally:
        server.stop()
