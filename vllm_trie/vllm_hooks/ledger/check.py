"""The ledger: every symbol of vLLM that the plugin overrides, wraps or relies on.

vLLM's internals are no stable interface. Each line says which symbol is touched, why, which
upstream issue or pull request is about it and when the line can go. :func:`check` compares the
ledger with the vLLM that is installed; what has moved makes the plugin step aside instead of
failing in a request.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vllm_trie.vllm_hooks.ledger.beam import BEAM_HOOKS
from vllm_trie.vllm_hooks.ledger.extension_points import offered
from vllm_trie.vllm_hooks.ledger.gpu import GPU_HOOKS
from vllm_trie.vllm_hooks.ledger.patch import Hook, resolve
from vllm_trie.vllm_hooks.ledger.speculation import SPECULATION_HOOKS

SUPPORTED_VLLM_VERSIONS = ("0.32", "0.33")
"""Release series of vLLM that the hooks were written for."""

Status = Literal["ok", "replaced", "missing", "changed"]
"""``replaced``: a patched vLLM has an extension point that the plugin uses instead."""


@dataclass(frozen=True, slots=True)
class LedgerFinding:
    """What :func:`check` found for one :class:`Hook`; ``detail`` is empty if it fits."""

    target: str
    reason: str
    status: Status
    detail: str
    upstream: str
    retire_when: str
    feature: str


def check_hook(hook: Hook) -> LedgerFinding:
    """Compare one line of the ledger with the installed vLLM."""

    def finding(status: Status, detail: str = "") -> LedgerFinding:
        return LedgerFinding(
            hook.target, hook.reason, status, detail, hook.upstream, hook.retire_when, hook.feature
        )

    if hook.extension_point and offered(hook.extension_point):
        return finding("replaced", f"by the extension point {hook.extension_point}")
    try:
        found = resolve(hook.target)
    except (ImportError, AttributeError) as error:
        return finding("missing", f"{type(error).__name__}: {error}")
    if hook.parameters is None:
        return finding("ok")
    names = [name for name in inspect.signature(found).parameters if name not in ("self", "cls")]
    positions = [names.index(name) if name in names else -1 for name in hook.parameters]
    if -1 in positions or positions != sorted(positions):
        return finding("changed", f"expected parameters {hook.parameters}, found {tuple(names)}")
    return finding("ok")


def all_hooks() -> tuple[Hook, ...]:
    """The whole ledger, speculation first, for all platforms."""
    return (*SPECULATION_HOOKS, *GPU_HOOKS, *BEAM_HOOKS)


def hooks_here() -> tuple[Hook, ...]:
    """The lines for vLLM's present platform."""
    from vllm.platforms import current_platform

    here = ("any", "cpu" if current_platform.is_cpu() else "cuda")
    return tuple(hook for hook in all_hooks() if hook.platform in here)


def check(hooks: Iterable[Hook] | None = None) -> list[LedgerFinding]:
    """Compare the ledger with the installed vLLM, line by line; this platform's if left out.

    Imports vLLM's modules; nothing is changed in them.
    """
    return [check_hook(hook) for hook in (hooks_here() if hooks is None else hooks)]


def mismatch(feature: str) -> str:
    """Why a feature must step aside with the installed vLLM; empty if it need not."""
    import vllm

    version = vllm.__version__
    problems = [
        f"{found.target} is {found.status} ({found.detail})"
        for found in check(hook for hook in hooks_here() if hook.feature == feature)
        if found.status in ("missing", "changed")
    ]
    if problems:
        return f"vLLM {version}: " + "; ".join(problems)
    if not version.startswith(tuple(f"{series}." for series in SUPPORTED_VLLM_VERSIONS)):
        return f"vLLM {version} is not a supported version"
    return ""
