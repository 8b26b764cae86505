"""The table's entries for beam search, in a vLLM that the plugin has patched."""

from __future__ import annotations

import inspect

from vllm_trie.vllm_hooks import ledger

BEAM_PATCHES = [patch for patch in ledger.entries() if patch.feature == "beam"]
REPLACING = [patch for patch in BEAM_PATCHES if patch.wrapper is not None]


def install() -> None:
    ledger.install("beam")


def test_the_table_agrees_with_the_installed_vllm():
    assert {finding.status for finding in ledger.check(BEAM_PATCHES)} == {"ok"}
    assert len({patch.target for patch in BEAM_PATCHES}) == len(BEAM_PATCHES)


def test_install_replaces_what_the_table_says_and_only_once():
    install()
    in_place = ledger.patches_in_place()
    assert set(REPLACING) <= set(in_place)
    first = {patch.target: ledger.resolve(patch.target) for patch in REPLACING}
    install()
    assert ledger.patches_in_place() == in_place
    for target, method in first.items():
        assert ledger.resolve(target) is method
        assert inspect.signature(method) == inspect.signature(method.__wrapped__)


def test_overridden_methods_are_in_the_table():
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_trie.vllm_hooks.scheduler.beam_scheduler import (
        AsyncTrieBeamScheduler,
        TrieBeamScheduler,
    )

    listed = {patch.target.rpartition(".")[2] for patch in BEAM_PATCHES}
    for ours, theirs in ((TrieBeamScheduler, Scheduler), (AsyncTrieBeamScheduler, AsyncScheduler)):
        for base in ours.__mro__[: ours.__mro__.index(theirs)]:
            overridden = {name for name in vars(base) if hasattr(theirs, name)}
            overridden = {name for name in overridden if not name.startswith("__")}
            overridden -= {"_abc_impl"}
            assert overridden <= listed, overridden - listed
