"""The command line's additions, on a parser shaped like vLLM's."""

from __future__ import annotations

import argparse

import pytest

from vllm_trie.drafters import available_methods
from vllm_trie.vllm_hooks.setup.arguments import add_methods


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--spec-method", choices=["eagle", "ngram"], default=None)
    parser.add_argument("--spec-model", default=None)
    add_methods(parser)
    return parser


@pytest.mark.parametrize("method", [*available_methods(), "eagle"])
def test_methods_are_choices(parser: argparse.ArgumentParser, method: str) -> None:
    assert parser.parse_args(["--spec-method", method]).spec_method == method


def test_an_unknown_method_is_refused(parser: argparse.ArgumentParser) -> None:
    with pytest.raises(argparse.ArgumentError, match="ngram_trie"):
        parser.parse_args(["--spec-method", "no_such_method"])


def test_a_misspelled_method_is_recognized(parser: argparse.ArgumentParser) -> None:
    with pytest.raises(argparse.ArgumentError, match="did you mean 'ngram_trie'") as caught:
        parser.parse_args(["--spec-method", "ngram_tri"])
    assert "--spec-method" in str(caught.value)
    with pytest.raises(argparse.ArgumentError, match="invalid choice: 'eagel'"):
        parser.parse_args(["--spec-method", "eagel"])


def test_the_alias_sets_the_model(parser: argparse.ArgumentParser) -> None:
    assert parser.parse_args(["--speculative-model", "ngram_trie"]).spec_model == "ngram_trie"
    assert parser.parse_args(["--spec-model", "ngram_trie"]).spec_model == "ngram_trie"


def test_without_the_alias_the_default_stays(parser: argparse.ArgumentParser) -> None:
    assert vars(parser.parse_args([])) == {"spec_method": None, "spec_model": None}


def test_twice_on_one_parser(parser: argparse.ArgumentParser) -> None:
    add_methods(parser)
    (action,) = (a for a in parser._actions if "--spec-method" in a.option_strings)
    assert sorted(action.choices) == sorted(["eagle", "ngram", *available_methods()])
    assert parser.parse_args(["--speculative-model", "x"]).spec_model == "x"
