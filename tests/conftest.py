"""Settings that must be in place before torch or vLLM is imported, and the order of the tests."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

_ENVIRONMENT = {
    # Idle OpenMP threads that spin slow a busy machine down 10 to 100 times.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # No test may need the network.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
# Without compiled files on disk, each process that imports vLLM compiles 5,000 modules: 20 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# vLLM's modules are no garbage: to look for it takes a tenth of the time that they take to import.
gc.set_threshold(100_000, 20, 50)

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests.checkout import ROOT  # noqa: E402

# Timings on shared machines vary too much for hypothesis' deadline and for its data-too-slow check.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("default", max_examples=100, **_COMMON)
settings.register_profile("ci", max_examples=100, derandomize=True, **_COMMON)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_configure(config: pytest.Config) -> None:
    """Compile what has changed in the C++ cores of this checkout, if its `.venv` runs the tests."""
    is_controller = not hasattr(config, "workerinput")
    if is_controller and (ROOT / ".venv").samefile(sys.prefix):
        setup = [sys.executable, str(ROOT / "packaging" / "setup_cpu.py"), "--cores"]
        if subprocess.run(setup, check=False).returncode:
            pytest.exit("the C++ cores do not compile", returncode=1)


@pytest.fixture
def plugin_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """`caplog` with the plugin's lines, which vLLM's logger keeps from pytest's."""
    if "vllm.logger" in sys.modules:  # each engine sets the loggers up
        monkeypatch.setattr("vllm.logger.dictConfig", lambda config: None)
    logger = logging.getLogger("vllm.vllm_trie")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    caplog.set_level(logging.INFO, logger.name)
    return caplog


@pytest.fixture(scope="session")
def full_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with all that requests can ask for; the files of `SHARE_A_SERVER` ask it."""
    from tests.engine import hostile
    from tests.engine.serving import running

    folder = tmp_path_factory.mktemp("server")
    with running(folder / "log", *hostile.server_options(folder)) as server:
        yield server


SHARE_A_SERVER = (
    "tests/engine/beam/test_server.py",
    "tests/extras/predictions/engine/test_http.py",
    "tests/extras/traces/engine/test_http.py",
    "tests/engine/test_hostile.py",
)
"""In this order: the last one attacks it."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a process one file at a time, or all files that share a server."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "a server" if file in SHARE_A_SERVER else file

    return Scheduling(config, log)


LONGEST = (
    "test_v2",
    "test_clean_room",
    "test_examples",
    "test_exactness",
    "test_gpu_classes",
    "test_benchmarks",
    "test_smollm2",
    "test_http",
    "test_sampling",
    "test_release_check",
    "test_wheel",
    "test_validate",
    "test_tensor_parallel",
    "test_patches",
    "test_searches_check",
)
"""Engine test files that start first: at the end, one test process would work on them alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts an engine, and run it last: a broken unit shows in the first minute."""

    def place(item: pytest.Item) -> tuple[int, int]:
        if item.get_closest_marker("engine") is None:
            return -1, 0
        path = item.path.relative_to(item.config.rootpath).as_posix()
        if path in SHARE_A_SERVER:
            return len(LONGEST), SHARE_A_SERVER.index(path)
        name = item.path.stem
        return LONGEST.index(name) if name in LONGEST else len(LONGEST) + 1, 0

    for item in items:
        if "engine" in item.path.relative_to(item.config.rootpath).parts[:-1]:
            item.add_marker(pytest.mark.engine)
    items.sort(key=place)
