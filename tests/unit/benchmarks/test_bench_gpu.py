"""`make bench-gpu` without a GPU: commands, their arguments, settings."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import bench_gpu, device, harness
from support.bench_gpu import BENCHMARKS
from transformers import AutoConfig, AutoTokenizer

from vllm_trie.lab import local_engine


class Parsed(Exception):
    """Raised by a benchmark once its arguments are parsed."""


def commands(tmp_path: Path, *arguments: str) -> dict[str, list[str]]:
    return bench_gpu.commands(bench_gpu.parse(["--out", str(tmp_path), *arguments]))


@pytest.mark.parametrize("name", [benchmark.name for benchmark in BENCHMARKS])
def test_each_benchmark_takes_its_arguments(name, tmp_path, monkeypatch):
    def stop(*arguments: Any) -> None:
        raise Parsed

    (command,) = commands(tmp_path, "--model", "some/model", "--only", name).values()
    assert Path(command[1]).is_file()
    script = importlib.import_module(name)
    assert script.__doc__ is not None
    for function in ("report_quietly", "check_device", "run"):
        if hasattr(script, function):
            monkeypatch.setattr(script, function, stop)
    monkeypatch.setattr(harness, "probe_seconds", lambda: 1.0)
    monkeypatch.setattr(local_engine, "set_environment", lambda *arguments: None)
    monkeypatch.setattr(sys, "argv", command[1:])
    with pytest.raises(Parsed):
        script.main()
    monkeypatch.setattr(sys, "argv", [*command[1:], "--no-such-option"])
    with pytest.raises(SystemExit) as refused:
        script.main()
    assert refused.value.code == 2
    takes_model = next(benchmark.takes_model for benchmark in BENCHMARKS if benchmark.name == name)
    assert ("some/model" in command) == takes_model
    assert "dummy" not in command


def test_without_a_model_the_weights_are_random(tmp_path):
    folder = str(tmp_path / "dummy-8b")
    for name, command in commands(tmp_path).items():
        if name != "attention":
            at = command.index("--model")
            assert command[at : at + 4] == ["--model", folder, "--load-format", "dummy"]
    config = AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("llama", 4096, 32)
    assert len(AutoTokenizer.from_pretrained(folder)) <= config.vocab_size


def test_a_device_that_vllm_does_not_run_on_is_refused():
    device.check_device("cpu")
    with pytest.raises(SystemExit, match="--device cuda: this vLLM runs on 'cpu'"):
        device.check_device("cuda")


def test_a_benchmark_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    def run(command: list[str], stdout: Any, check: bool) -> Any:
        name = Path(command[1]).stem
        stdout.write(f"table of {name}\n")
        return SimpleNamespace(returncode=3 * (name == "peers"))

    monkeypatch.setattr(bench_gpu.subprocess, "run", run)
    assert bench_gpu.main(["--out", str(tmp_path), "--model", "m"]) == 1
    printed = capsys.readouterr()
    assert "table of beam" in printed.out
    assert printed.err.endswith("failed: peers (status 3)\n")
    assert (tmp_path / "load.txt").read_text() == "table of load\n"
