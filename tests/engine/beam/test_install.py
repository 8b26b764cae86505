"""The hooks and their ledger."""

from __future__ import annotations

import inspect

from vllm_trie.vllm_hooks.ledger.beam import BEAM_HOOKS
from vllm_trie.vllm_hooks.ledger.check import check_hook
from vllm_trie.vllm_hooks.ledger.install_beam import install
from vllm_trie.vllm_hooks.ledger.patch import resolve


def wrapped_targets() -> set[str]:
    return {hook.target for hook in BEAM_HOOKS if hook.reason.startswith("wrapped")}


def test_ledger_agrees_with_the_installed_vllm():
    findings = [check_hook(hook) for hook in BEAM_HOOKS]
    assert {finding.status for finding in findings} == {"ok"}, findings
    assert all(hook.feature == "beam" for hook in BEAM_HOOKS)
    assert len({hook.target for hook in BEAM_HOOKS}) == len(BEAM_HOOKS)


def test_install_wraps_what_the_ledger_says_and_only_once():
    install()
    first = {target: resolve(target) for target in wrapped_targets()}
    install()
    for target, method in first.items():
        assert resolve(target) is method
        original = method._vllm_trie_original
        assert not hasattr(original, "_vllm_trie_original")
        assert inspect.signature(method) == inspect.signature(original)


def test_overridden_methods_are_in_the_ledger():
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_trie.vllm_hooks.scheduler.beam_scheduler import (
        AsyncTrieBeamScheduler,
        TrieBeamScheduler,
    )

    listed = {hook.target.rpartition(".")[2] for hook in BEAM_HOOKS}
    for ours, theirs in ((TrieBeamScheduler, Scheduler), (AsyncTrieBeamScheduler, AsyncScheduler)):
        for base in ours.__mro__[: ours.__mro__.index(theirs)]:
            overridden = {name for name in vars(base) if hasattr(theirs, name)}
            overridden = {name for name in overridden if not name.startswith("__")}
            overridden -= {"_abc_impl"}
            assert overridden <= listed, overridden - listed


def test_install_may_be_called_again_by_its_name():
    from vllm_trie.vllm_hooks.ledger import install_beam as beam

    beam.install()
    beam.install()
