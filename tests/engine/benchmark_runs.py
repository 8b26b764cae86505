"""Run every benchmark with `--smoke`, each in a fork of one process that has imported vLLM."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from tests.processes import ROOT
from vllm_trie.lab.tiny_model import model_path

BENCHMARKS = ROOT / "benchmarks"
RECORDED = ("plain", "ngram", "ngram_trie_fixed_8")
"""Methods whose drafts of recorded answers do not depend on measured times."""
VARIANTS = {
    "beam": [[], ["--wide"], ["--parts"]],
    "peers": [
        [],
        ["--workload", "chat", "--model", str(model_path()), "--dtype", "float32"],
        [
            *["--workload", "replay", "--max-tokens", "80", "--at-once", "1", "2", "--methods"],
            *RECORDED,
        ],
    ],
}
"""Further options, for what the defaults do not print."""


def commands() -> list[list[str]]:
    """Return the programs with their options."""
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    return [[name, *options] for name in names for options in VARIANTS.get(name, [[]])]


def run(name: str, *options: str) -> dict[str, Any]:
    """Run a benchmark in a fork; return its exit status, CPU seconds, output and rows."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if (child := os.fork()) == 0:
            os._exit(_become(name, *options))
        _, status, usage = os.wait4(child, 0)
        rows = Path("rows.json")
        return {
            "command": [name, *options],
            "status": os.waitstatus_to_exitcode(status),
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
            "printed": Path("printed").read_text(errors="replace"),
            "rows": json.loads(rows.read_text()) if rows.exists() else [],
        }


def _become(name: str, *options: str) -> int:
    """Run a benchmark in this process, its output in the file `printed`."""
    with open("printed", "wb", buffering=0) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    script = str(BENCHMARKS / f"{name}.py")
    sys.argv = [script, "--smoke", "--json", "rows.json", *options]
    sys.path.insert(0, str(BENCHMARKS))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print(end, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _prepare() -> None:
    """Do once what every fork would do again."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM  # noqa: F401
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform
    from vllm.plugins import load_general_plugins

    from tests.engine.conftest import do_once_what_starts_repeat

    load_general_plugins()
    do_once_what_starts_repeat()
    CpuPlatform.register_triton_kernel_overrides()
    registry._run_in_subprocess = lambda function: function()
    gc.freeze()  # engines collect garbage several times, 0.3 s each for vLLM's modules


if __name__ == "__main__":
    _prepare()
    chosen = [command for command in commands() if not sys.argv[1:] or command[0] in sys.argv[1:]]
    print("RESULT", json.dumps([run(*command) for command in chosen]))
