"""The whole table, and how it fits the installed vLLM."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_trie.extras import brought
from vllm_trie.hooks.ledger import record
from vllm_trie.hooks.ledger.entry import Entry, Feature, Platform, resolve
from vllm_trie.refusal import turned_off

_HOOKS: dict[tuple[Feature, Platform], str] = {
    ("speculation", "any"): "hooks.start.additional_config hooks.start.environment"
    " drafts.engine.uses"
    " drafts.engine.frontend.metrics drafts.engine.frontend.requests"
    " drafts.engine.frontend.token_streams drafts.engine.frontend.offline_log"
    " drafts.engine.start.arguments drafts.engine.start.aside drafts.engine.start.engine_args"
    " drafts.engine.scheduler.grammar_time drafts.engine.scheduler.next_drafts"
    " drafts.engine.scheduler.speculation drafts.engine.workers.drafting_worker"
    " drafts.engine.runners.v1 drafts.engine.runners.v2 drafts.engine.verification.sampling",
    ("speculation", "cpu"): "drafts.engine.workers.cpu_worker drafts.engine.attention.cpu",
    ("speculation", "cuda"): "drafts.engine.workers.cuda_worker drafts.engine.attention.cuda",
    ("beam", "any"): "hooks.start.cpu_memory"
    " searches.engine.uses searches.engine.frontend.beam_api"
    " searches.engine.frontend.extension searches.engine.frontend.hypotheses"
    " searches.engine.scheduler.beam_scheduler"
    " searches.engine.worker.beams_v1 searches.engine.worker.beams_v2",
    ("beam", "cpu"): "searches.engine.worker.block_copies searches.engine.worker.shared_prompt",
}
"""Modules with entries next to their code; a feature whose module cannot be imported steps aside.
Those of another platform stay out: vLLM's CPU worker puts placeholders into ``torch.cuda``."""
SUPPORTED_VLLM_VERSIONS = ("0.32", "0.33")
"""Release series of vLLM that the table was written for."""
TRIAL_SWITCH = "VLLM_TRIE_UNLISTED"

Status = Literal["ok", "missing", "changed", "not checked"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The fit of one :class:`Entry` to a vLLM; ``detail`` is empty if it does."""

    target: str
    reason: str
    status: Status
    detail: str
    upstream: str
    retire_when: str
    feature: str

    @property
    def fits(self) -> bool:
        """Whether the feature can run."""
        return self.status == "ok"


def entries() -> tuple[Entry, ...]:
    """Return every symbol of vLLM that the plugin touches, on all platforms."""
    for platform in ("any", "cpu", "cuda"):
        load(platform)
    return tuple(sorted(record.ENTRIES, key=lambda p: (p.target, p.feature, p.scope)))


def entries_here(feature: Feature | None = None) -> list[Entry]:
    """Return the entries for vLLM's present platform, of one feature or of all."""
    here = _platforms()
    for platform in here:
        load(platform)
    return [p for p in record.ENTRIES if p.platform in here and feature in (None, p.feature)]


def _platforms() -> tuple[Platform, Platform]:
    from vllm.platforms import current_platform

    return "any", "cpu" if current_platform.is_cpu() else "cuda"


def modules(platform: Platform) -> Iterator[tuple[Feature, str]]:
    """Yield the hook modules of a platform, with their features; those of extras last, so that
    their wraps of a symbol run first."""
    for package, hooks in (("vllm_trie", _HOOKS), *brought("hooks")):
        for (feature, where), names in hooks.items():
            if where == platform:
                yield from ((feature, f"{package}.{name}") for name in names.split())


@functools.cache
def load(platform: Platform) -> tuple[Finding, ...]:
    """Import a platform's hook modules, which record their entries; return what fails."""
    failures = []
    for feature, module in modules(platform):
        try:
            importlib.import_module(module)
        except Exception as error:  # vLLM lacks what the module is made of
            detail = f"{type(error).__name__}: {error}"
            failures.append(Finding(module, "imported", "missing", detail, "", "", feature))
    return tuple(failures)


def check() -> list[Finding]:
    """Compare the entries of the table for this platform with the installed vLLM."""
    findings = [check_entry(entry) for entry in entries_here()]
    return [*(failure for platform in _platforms() for failure in load(platform)), *findings]


def _parameters_here(target: str, is_called: bool) -> Sequence[str]:
    symbol = resolve(target)
    return tuple(inspect.signature(symbol).parameters) if is_called else ()


def check_entry(
    entry: Entry, parameters_of: Callable[[str, bool], Sequence[str]] = _parameters_here
) -> Finding:
    """Compare one entry of the table with a vLLM, by default the installed one.

    Args:
        entry: Of the table.
        parameters_of: Takes a target and whether it is called, and returns the names of its
            parameters then. Raises ImportError or AttributeError if it is not there, and
            NotImplementedError if nobody can tell.
    """
    status, detail = _compare(entry, parameters_of)
    return Finding(
        entry.target,
        entry.reason,
        status,
        detail,
        entry.upstream,
        entry.until,
        entry.feature,
    )


def _compare(
    entry: Entry, parameters_of: Callable[[str, bool], Sequence[str]]
) -> tuple[Status, str]:
    try:
        parameters = parameters_of(entry.target, entry.parameters is not None)
    except (ImportError, AttributeError) as error:
        return "missing", f"{type(error).__name__}: {error}"
    except NotImplementedError as error:
        return "not checked", str(error)
    if entry.parameters is None:
        return "ok", ""
    names = [name for name in parameters if name not in ("self", "cls")]
    positions = [names.index(name) if name in names else -1 for name in entry.parameters]
    if -1 in positions or positions != sorted(positions):
        return "changed", f"expected parameters {entry.parameters}, found {tuple(names)}"
    return "ok", ""


def is_unlisted() -> bool:
    """Return whether the table was written for other releases than the installed vLLM."""
    import vllm

    series = tuple(f"{series}." for series in SUPPORTED_VLLM_VERSIONS)
    return not vllm.__version__.startswith(series)


def mismatch(feature: Feature) -> str:
    """Return why a feature must step aside with the installed vLLM; empty if it need not.

    On a release that is not listed it need not where an extra checks it at the start of an engine.
    """
    import vllm

    version = vllm.__version__
    problems = [
        f"{finding.target} is {finding.status} ({finding.detail})"
        for finding in check()
        if finding.feature == feature and not finding.fits
    ]
    if problems:
        return f"vLLM {version}: " + "; ".join(problems)
    if not is_unlisted():
        return ""
    if how := turned_off(TRIAL_SWITCH):
        return f"vLLM {version} is not a supported version, and {how} has it not tried"
    if not any("release" in checks for _, checks in brought("checks")):
        return f"vLLM {version} is not a supported version, and nothing here could check it"
    return ""
