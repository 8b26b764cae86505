"""The part of `validate` that measures speed; `tests.engine.test_validate` runs it."""

from __future__ import annotations

from typing import Any

from vllm_trie.lab.check import speed
from vllm_trie.lab.check.parts import Settings


def test_engines_without_room_for_one_another_are_not_started(monkeypatch, tmp_path):
    """The first one shows what each takes, whether the model is a folder or a name."""
    started: list[Any] = []
    free = [100 << 30, 60 << 30]
    monkeypatch.setattr(speed, "_free_bytes", lambda: free[len(started)])
    monkeypatch.setattr(speed, "prompts", lambda settings: [[1, 2]])
    monkeypatch.setattr(speed, "start_engine", lambda *args, **kwargs: started.append(kwargs))
    settings = Settings(model="of/the-hub", heads=None, quick=True, folder=tmp_path)
    outcome = speed.measure(settings, "bfloat16")
    assert outcome.status == "not applicable"
    assert outcome.summary == "3 engines at once need 120 GiB, 100 GiB are free"
    assert [kwargs["speculative_config"] for kwargs in started] == [None]
