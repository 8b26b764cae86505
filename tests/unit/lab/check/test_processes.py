"""Parts in processes of their own: each end of a process is told, and the next part runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from vllm_trie.lab.check.parts import Part, Settings
from vllm_trie.lab.check.processes import run_parts
from vllm_trie.lab.check.report import PartReport

# Acts out the argument "act" of a part; imports nothing slow.
ACTOR = """
import json, os, signal, subprocess, sys, time
part, settings, result = sys.argv[1:]
act = json.loads(part)["arguments"]["act"]
print("acting out", act, flush=True)
def write(status):
    with open(result, "w") as file:
        json.dump({"status": status, "summary": act, "measured": {"seen": 1}}, file)
if act == "raise":
    raise RuntimeError("the device is on fire")
if act == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    time.sleep(600)
if act == "kill":
    write("passed")
    os.kill(os.getpid(), signal.SIGKILL)
if act == "abort":
    os.abort()
if act == "leave":
    sys.exit(7)
if act == "half a result":
    open(result, "w").write('{"status": "pas')
if act in ("passed", "failed"):
    write(act)
"""


def run(
    tmp_path: Path, *acts: str, limit: float = 30.0, needs: str | None = None
) -> list[PartReport]:
    settings = Settings(model="m", heads=None, quick=True, folder=tmp_path)
    parts = [Part(name=act, work="", arguments={"act": act}) for act in acts]
    parts[-1].needs = needs
    return list(run_parts(parts, settings, limit, child=("-c", ACTOR)))


@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("raise", "ended with status 1: RuntimeError: the device is on fire"),
        ("kill", "killed by SIGKILL"),  # although it had left a result
        ("abort", "killed by SIGABRT"),
        ("leave", "ended with status 7"),
        ("half a result", "ended with status 0 and without a result"),
        ("nothing", "ended with status 0 and without a result"),
        ("failed", "failed"),
    ],
)
def test_a_part_that_fails_is_told_and_the_next_one_runs(tmp_path, act, said):
    broken, after = run(tmp_path, act, "passed")
    assert (broken.name, broken.status, broken.summary) == (act, "failed", said)
    assert f"acting out {act}" in broken.log
    assert (after.status, after.summary, after.log) == ("passed", "passed", ())
    assert after.measured == {"seen": 1}


def test_a_part_that_hangs_ends_at_its_limit_with_all_that_it_started(tmp_path):
    start = time.monotonic()
    (hung,) = run(tmp_path, "hang", limit=4.0)
    assert time.monotonic() - start < 60
    assert hung.summary == "stopped at its limit of 4 s"
    child = int(hung.log[-1].split()[1])
    while is_running(child):  # killed, but the kernel may take a moment
        assert time.monotonic() - start < 60
        time.sleep(0.01)


def is_running(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_part_without_what_it_needs_is_left_out(tmp_path):
    *_, left_out = run(tmp_path, "raise", "passed", needs="raise")
    assert (left_out.status, left_out.seconds) == ("failed", 0.0)
    assert left_out.summary == "left out: the part “raise” failed"
    *_, ran = run(tmp_path, "failed", "nothing", "passed", needs="another")
    assert ran.status == "passed"


def test_an_old_result_is_no_result(tmp_path):
    passed, nothing = run(tmp_path, "passed", "nothing")
    assert (passed.status, nothing.status) == ("passed", "failed")
    assert os.listdir(tmp_path) == ["log.txt"]
