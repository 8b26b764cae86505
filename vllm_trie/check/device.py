"""Versions, the device, and whether the plugin's patches fit."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import asdict

from vllm_trie import doctor
from vllm_trie.check.parts import Outcome, Settings

_QUERY = ("--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


def describe(settings: Settings) -> Outcome:
    """Return `vllm-trie doctor`'s report, without its run of the GPU's kernel."""
    report = doctor.collect(run_kernel=False)
    platform = {name: value for name, value in report.platform.items() if value is not None}
    if program := shutil.which("nvidia-smi"):
        asked = subprocess.run([program, *_QUERY], capture_output=True, text=True, check=False)
        platform["nvidia-smi"] = "; ".join(asked.stdout.split("\n")).strip("; ")
    versions = {name: value for name, value in report.versions.items() if value is not None}
    rows = [f"| {name} | {_text(value)} |" for name, value in (versions | platform).items()]
    fits = sum(hook.status == "ok" for hook in report.hooks)
    hooks = f"{fits} of {len(report.hooks)} hooks fit"
    problems = [f"- {problem.level}: {problem.text}" for problem in report.problems]
    errors = [problem.text for problem in report.problems if problem.level == "error"]
    return Outcome(
        status="failed" if errors else "passed",
        summary="; ".join(errors) or f"{_device(platform)}; vLLM {versions['vllm']}; {hooks}",
        details=["| | |", "| --- | --- |", *rows, *([""] if problems else []), *problems],
        measured=asdict(report),
    )


def _device(platform: dict[str, object]) -> str:
    if platform["device"] == "cuda":
        return f"{platform['gpu']}, compute capability {_text(platform['compute_capability'])}"
    return f"{platform['system']}, {platform['cores']} cores, {_text(platform['isa'])}"


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
