"""The commands `vllm-trie items`."""

from tests.unit.test_cli import answer_at_once


def test_help_comes_at_once():
    assert "Catalogues of items" in answer_at_once("items", "--help")
    assert "Catalogues of items" in answer_at_once("--help")
