from importlib.metadata import EntryPoint

import pytest

from vllm_trie.drafts import (
    Drafter,
    DrafterOptions,
    available_methods,
    get_drafter_class,
    parse_options,
    register,
    unregister,
)
from vllm_trie.drafts import registry as registry_module


def test_every_available_method_loads_and_has_default_options():
    assert "ngram_trie" in available_methods()
    for method in available_methods():
        drafter = get_drafter_class(method)
        assert issubclass(drafter, Drafter)
        assert drafter.name == method


def test_unknown_method_names_what_is_allowed():
    with pytest.raises(ValueError, match=r"'nonesuch'.*allowed:.*ngram_trie"):
        get_drafter_class("nonesuch")


def test_methods_of_other_packages(monkeypatch):
    points = [
        EntryPoint("mine", "vllm_trie.drafts.ngram_trie:NgramTrieDrafter", "vllm_trie.drafters"),
        EntryPoint("broken", "vllm_trie.drafters:parse_options", "vllm_trie.drafters"),
        EntryPoint("ngram_trie", "vllm_trie.drafters:parse_options", "vllm_trie.drafters"),
    ]
    by_name = {point.name: point for point in points}
    monkeypatch.setattr(registry_module, "_entry_points", lambda: by_name)
    assert {"mine", "broken", "ngram_trie"} <= set(available_methods())
    assert get_drafter_class("mine").name == "ngram_trie"
    assert get_drafter_class("ngram_trie").name == "ngram_trie"
    with pytest.raises(ValueError, match=r"broken.*not a subclass"):
        get_drafter_class("broken")


class Mine(Drafter):
    name = "mine"
    Options = DrafterOptions

    def propose(self, requests):
        return []


def test_a_class_becomes_a_method_of_this_process():
    register(Mine)
    register(Mine)
    try:
        assert "mine" in available_methods()
        assert get_drafter_class("mine") is Mine
        with pytest.raises(ValueError, match=r"Other has the name 'mine', which belongs to Mine"):
            register(type("Other", (Mine,), {}))
    finally:
        unregister(Mine)
    unregister(Mine)
    assert "mine" not in available_methods()


@pytest.mark.parametrize("wrong", [None, parse_options, Mine.__mro__[-1], Drafter])
def test_what_is_no_drafter_is_not_registered(wrong):
    with pytest.raises(
        ValueError, match=r"register\(\) got .*subclass of .*Drafter that has a `name`"
    ):
        register(wrong)


def test_names_that_are_taken(monkeypatch):
    with pytest.raises(ValueError, match=r"'ngram_trie', which belongs to NgramTrieDrafter"):
        register(type("Other", (Mine,), {"name": "ngram_trie"}))
    point = EntryPoint("mine", "vllm_trie.drafts.ngram_trie:NgramTrieDrafter", "group")
    monkeypatch.setattr(registry_module, "_entry_points", lambda: {"mine": point})
    with pytest.raises(ValueError, match=r"'mine', which belongs to NgramTrieDrafter"):
        register(Mine)


def test_every_wrong_option_is_named_once():
    with pytest.raises(ValueError, match="options of method 'ngram_trie'") as caught:
        parse_options("ngram_trie", {"store_reload_minutes": 5, "nope": 1})
    said = str(caught.value)
    assert said.count("store_reload_minutes=5 has no effect since 0.5") == 1
    assert said.count("nope is not an option") == 1
