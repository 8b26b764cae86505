"""Settings that must be in place before torch or vLLM is imported, and the order of the tests."""

from __future__ import annotations

import os
import subprocess
import sys

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


LONGEST = (
    "test_clean_room",
    "test_examples",
    "test_benchmarks",
    "test_v2",
    "test_http",
    "test_patches",
    "test_configuration",
    "test_exactness",
    "test_gpu",
    "test_tensor_parallel",
    "test_validate",
    "test_gpu_classes",
)
"""Engine test files that start first: at the end, one test process would work on them alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts an engine, and run it last: a broken unit shows in the first minute."""

    def place(item: pytest.Item) -> int:
        if item.get_closest_marker("engine") is None:
            return -1
        name = item.path.stem
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    for item in items:
        if "engine" in item.path.relative_to(item.config.rootpath).parts[:-1]:
            item.add_marker(pytest.mark.engine)
    items.sort(key=place)
