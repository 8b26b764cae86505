"""The whole table, and how it fits the installed vLLM."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vllm_trie.vllm_hooks.ledger.beam import BEAM_PATCHES
from vllm_trie.vllm_hooks.ledger.extension_points import offered
from vllm_trie.vllm_hooks.ledger.patch import Feature, Patch, resolve
from vllm_trie.vllm_hooks.ledger.speculation import GPU_PATCHES, SPECULATION_PATCHES, V2_PATCHES

PATCHES: tuple[Patch, ...] = (*SPECULATION_PATCHES, *GPU_PATCHES, *V2_PATCHES, *BEAM_PATCHES)
"""Every symbol of vLLM that the plugin touches, on all platforms."""
SUPPORTED_VLLM_VERSIONS = ("0.32", "0.33")
"""Release series of vLLM that the table was written for."""

Status = Literal["ok", "replaced", "missing", "changed"]
"""``replaced``: a patched vLLM has an extension point that the plugin uses instead."""


@dataclass(frozen=True, slots=True)
class Finding:
    """How one :class:`Patch` fits the installed vLLM; ``detail`` is empty if it does."""

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
        return self.status in ("ok", "replaced")


def patches_here(feature: Feature | None = None) -> list[Patch]:
    """Return the entries for vLLM's present platform, of one feature or of all."""
    from vllm.platforms import current_platform

    here = ("any", "cpu" if current_platform.is_cpu() else "cuda")
    return [p for p in PATCHES if p.platform in here and feature in (None, p.feature)]


def check(patches: Iterable[Patch] | None = None) -> list[Finding]:
    """Compare entries of the table, by default those for this platform, with the installed vLLM."""
    return [check_patch(patch) for patch in (patches_here() if patches is None else patches)]


def check_patch(patch: Patch) -> Finding:
    """Compare one entry of the table with the installed vLLM."""
    status, detail = _compare(patch)
    return Finding(
        patch.target,
        patch.reason,
        status,
        detail,
        patch.upstream,
        patch.retire_when,
        patch.feature,
    )


def _compare(patch: Patch) -> tuple[Status, str]:
    if patch.extension_point and offered(patch.extension_point):
        return "replaced", f"by the extension point {patch.extension_point}"
    try:
        found = resolve(patch.target)
    except (ImportError, AttributeError) as error:
        return "missing", f"{type(error).__name__}: {error}"
    if patch.parameters is None:
        return "ok", ""
    names = [name for name in inspect.signature(found).parameters if name not in ("self", "cls")]
    positions = [names.index(name) if name in names else -1 for name in patch.parameters]
    if -1 in positions or positions != sorted(positions):
        return "changed", f"expected parameters {patch.parameters}, found {tuple(names)}"
    return "ok", ""


def mismatch(feature: Feature) -> str:
    """Return why a feature must step aside with the installed vLLM; empty if it need not."""
    import vllm

    version = vllm.__version__
    problems = [
        f"{found.target} is {found.status} ({found.detail})"
        for found in check(patches_here(feature))
        if not found.fits
    ]
    if problems:
        return f"vLLM {version}: " + "; ".join(problems)
    if not version.startswith(tuple(f"{series}." for series in SUPPORTED_VLLM_VERSIONS)):
        return f"vLLM {version} is not a supported version"
    return ""
