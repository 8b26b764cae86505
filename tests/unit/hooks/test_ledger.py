"""The ledger notices what has moved."""

from __future__ import annotations

import pytest

from vllm_trie.vllm_hooks.ledger import check as ledger
from vllm_trie.vllm_hooks.ledger.check import check, check_hook
from vllm_trie.vllm_hooks.ledger.patch import Hook


class Subject:
    def method(self, first: int, second: int = 0, *, third: int = 0) -> None: ...


HERE = f"{__name__}:Subject"


@pytest.mark.parametrize(
    "parameters",
    [None, (), ("first",), ("first", "second"), ("first", "third"), ("second", "third")],
)
def test_what_fits(parameters: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, __name__, _this_module())
    finding = check_hook(Hook(f"{HERE}.method", "why", parameters))
    assert (finding.status, finding.detail) == ("ok", "")


def _this_module() -> object:
    import types

    module = types.ModuleType(__name__)
    module.Subject = Subject  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("parameters", [("renamed",), ("second", "first"), ("first", "gone")])
def test_changed_signatures(parameters: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, __name__, _this_module())
    finding = check_hook(Hook(f"{HERE}.method", "why", parameters))
    assert finding.status == "changed"
    assert "first" in finding.detail
    assert parameters[0] in finding.detail


@pytest.mark.parametrize(
    "target", ["no_such_package.module:x", "json:no_such_name", "json:JSONDecoder.no_such_name"]
)
def test_missing_symbols(target: str) -> None:
    finding = check_hook(Hook(target, "why"))
    assert finding.status == "missing"
    assert "no_such" in finding.detail
    assert finding.target == target


def test_whole_modules_and_order() -> None:
    hooks = (Hook("json", "a"), Hook("json:gone", "b"), Hook("json:loads", "c", ("s",)))
    assert [finding.status for finding in check(hooks)] == ["ok", "missing", "ok"]


def test_every_line_says_why_and_until_when() -> None:
    for hook in ledger.all_hooks():
        assert hook.reason
        assert hook.retire_when, hook.target
        assert hook.target.startswith("vllm."), hook.target
    targets = [(hook.target, hook.feature) for hook in ledger.all_hooks()]
    assert len(set(targets)) == len(targets)
