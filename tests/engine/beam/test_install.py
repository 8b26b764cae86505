"""The table's entries for beam search, in a vLLM that the plugin has patched."""

from __future__ import annotations

from vllm_trie.hooks import ledger


def test_overridden_methods_are_in_the_table():
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_trie.searches.engine.scheduler.beam_scheduler import (
        AsyncTrieBeamScheduler,
        TrieBeamScheduler,
    )

    entries = [patch for patch in ledger.entries() if patch.feature == "beam"]
    listed = {patch.target.rpartition(".")[2] for patch in entries}
    for ours, theirs in ((TrieBeamScheduler, Scheduler), (AsyncTrieBeamScheduler, AsyncScheduler)):
        for base in ours.__mro__[: ours.__mro__.index(theirs)]:
            overridden = {name for name in vars(base) if hasattr(theirs, name)}
            overridden = {name for name in overridden if not name.startswith("__")}
            overridden -= {"_abc_impl"}
            assert overridden <= listed, overridden - listed
