"""What the user may write, and how vLLM gets to see it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.items.catalogues import write
from vllm_trie.vllm_hooks.setup import beam_support
from vllm_trie.vllm_hooks.setup import translate as translation
from vllm_trie.vllm_hooks.setup.config import CONFIG_KEY, PROPOSER_CLASS, read
from vllm_trie.vllm_hooks.setup.translate import (
    DEFAULT_NODES,
    MAX_NODES,
    requested_method,
    translate,
)


@pytest.fixture(autouse=True)
def _fields(monkeypatch):
    """Some fields of vLLM's class; importing it takes longer than all these tests."""
    fields = {"method", "model", "num_speculative_tokens", "quantization", "draft_sample_method"}
    fields |= {"prompt_lookup_max", "suffix_decoding_max_tree_depth"}
    monkeypatch.setattr(translation, "_speculative_config_fields", lambda: frozenset(fields))


def arguments(speculative: Any = None, additional: Any = None, **flags: Any) -> SimpleNamespace:
    values = {"spec_method": None, "spec_model": None, "spec_tokens": None, **flags}
    return SimpleNamespace(speculative_config=speculative, additional_config=additional, **values)


def translated(*args: Any, **flags: Any) -> SimpleNamespace:
    engine_args = arguments(*args, **flags)
    translate(engine_args)
    return engine_args


def as_worker_sees(engine_args: SimpleNamespace) -> SimpleNamespace:
    speculative = engine_args.speculative_config
    return SimpleNamespace(
        speculative_config=speculative and SimpleNamespace(**speculative),
        additional_config=engine_args.additional_config,
    )


WAYS = {
    "method": arguments({"method": "ngram_trie"}),
    "model": arguments({"model": "ngram_trie"}),
    "both": arguments({"method": "ngram_trie", "model": "ngram_trie"}),
    "--spec-method": arguments(spec_method="ngram_trie"),
    "--spec-model": arguments(spec_model="ngram_trie"),
    "--spec-method and --spec-model": arguments(spec_method="ngram_trie", spec_model="ngram_trie"),
    "flag and dictionary": arguments({"method": "ngram_trie"}, spec_method="ngram_trie"),
}


@pytest.mark.parametrize("way", WAYS)
def test_all_ways_to_name_a_method(way):
    engine_args = arguments(**{})
    engine_args.__dict__.update(WAYS[way].__dict__)
    assert requested_method(engine_args) == "ngram_trie"
    translate(engine_args)
    assert engine_args.speculative_config == {
        "method": "custom_class",
        "model": PROPOSER_CLASS,
        "num_speculative_tokens": DEFAULT_NODES,
    }
    settings = read(as_worker_sees(engine_args))
    assert settings.method == "ngram_trie"
    assert settings.draft_model is None


def test_translating_twice_changes_nothing():
    engine_args = translated(
        {"method": "ngram_trie", "max_context_len": 9, "num_speculative_tokens": 7},
        {"theirs": 1, CONFIG_KEY: {"store_tokens": 2}},
    )
    before = dict(vars(engine_args))
    translate(engine_args)
    assert vars(engine_args) == before
    assert before["additional_config"]["theirs"] == 1


@pytest.mark.parametrize(
    "engine_args",
    [
        arguments(),
        arguments({"method": "ngram", "num_speculative_tokens": 4}),
        arguments({"method": "eagle", "model": "some/model"}),
        arguments({"method": "custom_class", "model": "theirs.Proposer"}),
        arguments(spec_method="ngram"),
        arguments(additional={"theirs": 1}),
        arguments("no dictionary"),
    ],
)
def test_what_is_not_ours_is_left_alone(engine_args):
    before = dict(vars(engine_args))
    translate(engine_args)
    assert vars(engine_args) == before
    assert requested_method(engine_args) is None


@pytest.mark.parametrize(
    "engine_args",
    [
        arguments({"method": "ngram_trie", "max_context_len": 9, "draft_timeout_s": 2.0}),
        arguments(
            {"method": "ngram-trie".replace("-", "_"), "max-context-len": 9, "draft-timeout-s": 2.0}
        ),
        arguments(
            {"method": "ngram_trie"}, {CONFIG_KEY: {"max_context_len": 9, "draft_timeout_s": 2.0}}
        ),
        arguments(
            None,
            {CONFIG_KEY: {"max_context_len": 9, "draft_timeout_s": 2.0}},
            spec_method="ngram_trie",
        ),
        arguments(
            {"method": "ngram_trie", "max_context_len": 9},
            {CONFIG_KEY: {"max_context_len": 9, "draft_timeout_s": 2.0, "method": "ngram_trie"}},
        ),
    ],
)
def test_options_arrive(engine_args):
    translate(engine_args)
    settings = read(as_worker_sees(engine_args))
    assert settings.drafter_options.max_context_len == 9
    defaults = type(settings.drafter_options)()
    assert settings.drafter_options.store_tokens == defaults.store_tokens
    assert settings.engine_options.draft_timeout_s == 2.0


def test_vllms_own_settings_stay_with_vllm():
    engine_args = translated({"method": "ngram_trie", "quantization": "x", "max_context_len": 9})
    assert engine_args.speculative_config["quantization"] == "x"
    assert engine_args.additional_config == {
        CONFIG_KEY: {"method": "ngram_trie", "max_context_len": 9}
    }


@pytest.mark.parametrize("value", [1, DEFAULT_NODES, MAX_NODES])
def test_node_budgets(value):
    for engine_args in (
        translated({"method": "ngram_trie", "num_speculative_tokens": value}),
        translated(spec_method="ngram_trie", spec_tokens=value),
    ):
        assert engine_args.speculative_config["num_speculative_tokens"] == value


@pytest.mark.parametrize("value", [0, -1, MAX_NODES + 1, True, "8", 8.0, [8]])
def test_wrong_node_budgets(value):
    with pytest.raises(ValueError, match="num_speculative_tokens") as caught:
        translated({"method": "ngram_trie", "num_speculative_tokens": value})
    message = str(caught.value)
    assert f"num_speculative_tokens={value!r}" in message
    assert f"from 1 to {MAX_NODES}" in message
    assert "leave it out" in message


@pytest.mark.parametrize("place", ["speculative", "additional"])
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        (
            "no_such_option",
            1,
            ["no_such_option", "not an option", "max_context_len", "draft_timeout_s"],
        ),
        ("max_context_len", "9", ["max_context_len='9'", "integer"]),
        ("max_context_len", True, ["max_context_len=True", "integer"]),
        ("max_context_len", 9.5, ["max_context_len=9.5", "integer"]),
        ("max_context_len", 0, ["max_context_len=0", "1"]),
        ("max_context_len", 16, ["max_context_len=16", "15"]),
        ("index_output", "yes", ["index_output='yes'", "boolean"]),
        ("store_tokens", -1, ["store_tokens=-1", "0"]),
        ("draft_timeout_s", 0.0, ["draft_timeout_s=0.0", "greater than 0"]),
        ("draft_timeout_s", "fast", ["draft_timeout_s='fast'", "number"]),
    ],
)
def test_wrong_options(place, option, value, said):
    engine_args = (
        arguments({"method": "ngram_trie", option: value})
        if place == "speculative"
        else arguments({"method": "ngram_trie"}, {CONFIG_KEY: {option: value}})
    )
    with pytest.raises(ValueError, match="ngram_trie") as caught:
        translate(engine_args)
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("engine_args", "said"),
    [
        (
            arguments(
                {"method": "ngram_trie", "max_context_len": 9}, {CONFIG_KEY: {"max_context_len": 8}}
            ),
            ["max_context_len", "9", "8", "differ", "give one"],
        ),
        (
            arguments({"method": "ngram_trie", "num_speculative_tokens": 8}, spec_tokens=16),
            ["--spec-tokens=16", "8", "differ", "give one"],
        ),
        (
            arguments({"method": "ngram"}, spec_method="ngram_trie"),
            ["--spec-method='ngram_trie'", "'ngram'", "differ", "give one"],
        ),
        (
            arguments({"method": "eagle", "model": "ngram_trie"}),
            ["'ngram_trie'", "method='eagle'", "leave the model out"],
        ),
        (
            arguments({"method": "ngram_trie", "model": "lookahead_trie"}),
            ["'ngram_trie'", "'lookahead_trie'", "differ", "trie_union"],
        ),
        (
            arguments(None, spec_method="ngram_trie", spec_model="lookahead_trie"),
            ["'ngram_trie'", "'lookahead_trie'", "differ", "trie_union"],
        ),
        (
            arguments({"method": "ngram_trie"}, {CONFIG_KEY: {"method": "other"}}),
            ["'ngram_trie'", "'other'", "differ", "give one"],
        ),
        (arguments({"method": "ngram_trie"}, ["a list"]), ["additional_config", "mapping"]),
        (arguments({"method": "ngram_trie"}, {CONFIG_KEY: 5}), [CONFIG_KEY, "5", "mapping"]),
        (arguments("ngram_trie"), ["'ngram_trie'", "dictionary", "{'method': 'ngram_trie'}"]),
        (arguments("x", spec_method="ngram_trie"), ["'x'", "dictionary"]),
        (arguments({"method": "ngram_trie", "model": 5}), ["5", "path or a name"]),
        (arguments({"method": "ngram_trie", "prompt_lookup_max": 5}), ["prompt_lookup_max"]),
        (
            arguments({"method": "trie_union", "suffix_decoding_max_tree_depth": 5}),
            ["suffix_decoding_max_tree_depth", "'trie_union'"],
        ),
        (
            arguments({"method": "ngram_trie"}, {"vllm-trie": {"recycle": True}}),
            ["additional_config['vllm-trie']", "write 'vllm_trie'"],
        ),
        (
            arguments({"method": "ngram_trie"}, {"beam_search": False}),
            ["additional_config['beam_search']", "additional_config['vllm_trie']['beam_search']"],
        ),
    ],
)
def test_contradictions(engine_args, said):
    with pytest.raises(ValueError, match=r"must be|differ|leave|write") as caught:
        translate(engine_args)
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize("speculative", [None, {"method": "ngram"}])
def test_options_without_a_method_are_refused(speculative):
    for option in ("method", "node_budget"):
        with pytest.raises(ValueError, match=f"sets {option}, but no speculative method") as caught:
            translate(arguments(speculative, {CONFIG_KEY: {option: "ngram_trie"}}))
        assert "--spec-method" in str(caught.value)


def test_options_of_beam_search_need_no_method():
    engine_args = arguments(None, {CONFIG_KEY: {"beam_search": False, "allow_untested_gpu": True}})
    translate(engine_args)
    assert engine_args.speculative_config is None


@pytest.mark.parametrize("speculative", [None, {"method": "ngram_trie"}])
@pytest.mark.parametrize("key", ["beam_search", "allow_untested_gpu"])
@pytest.mark.parametrize("value", [0, 1, "false", None, {}])
def test_switches_are_true_or_false(speculative, key, value):
    with pytest.raises(ValueError, match="must be True or False") as caught:
        translate(arguments(speculative, {CONFIG_KEY: {key: value}}))
    assert f"additional_config['vllm_trie']['{key}']={value!r}" in str(caught.value)


@pytest.mark.parametrize("speculative", [None, {"method": "ngram"}])
def test_a_part_that_is_no_mapping_is_refused_without_a_method_too(speculative):
    with pytest.raises(ValueError, match="must be a mapping"):
        translate(arguments(speculative, {CONFIG_KEY: "beam_search=False"}))


def test_a_path_is_the_drafters_own_model():
    engine_args = translated({"method": "ngram_trie", "model": "some/heads"})
    assert engine_args.speculative_config["model"] == PROPOSER_CLASS
    settings = read(as_worker_sees(engine_args))
    assert settings.draft_model == "some/heads"
    translate(engine_args)
    assert read(as_worker_sees(engine_args)) == settings


def test_a_trained_drafter_becomes_its_method_of_vllm():
    entry = {"method": "eagle3", "model": "some/head", "num_speculative_tokens": 3}
    union = {"method": "trie_union", "drafters": ["ngram", entry], "num_speculative_tokens": 24}
    engine_args = translated({**union, "quantization": "fp8"})
    assert engine_args.speculative_config == {
        "quantization": "fp8",
        "method": "eagle3",
        "model": "some/head",
        "num_speculative_tokens": 24,
    }
    settings = read(as_worker_sees(engine_args))
    assert settings.method == "trie_union"
    assert settings.neural.num_speculative_tokens == 3
    before = dict(vars(engine_args))
    translate(engine_args)
    assert vars(engine_args) == before


def test_the_class_without_a_method_is_refused():
    engine_args = translated({"method": "custom_class", "model": PROPOSER_CLASS})
    with pytest.raises(ValueError, match="names no method") as caught:
        read(as_worker_sees(engine_args))
    assert "ngram_trie" in str(caught.value)


def test_engines_without_trees_have_no_configuration():
    assert read(as_worker_sees(arguments())) is None
    assert read(as_worker_sees(arguments({"model": "ngram"}))) is None


@pytest.mark.parametrize("speculative", [None, {"method": "ngram_trie"}])
@pytest.mark.parametrize("items", ["path", ["path"], {"name": 3}, {"name": ""}, {3: "path"}, None])
def test_catalogues_are_paths_by_name(speculative, items):
    with pytest.raises(ValueError, match="must map names to paths, as in") as caught:
        translate(arguments(speculative, {CONFIG_KEY: {"items": items}}))
    assert f"additional_config['vllm_trie']['items']={items!r}" in str(caught.value)


def serving(path: object, **values: Any) -> SimpleNamespace:
    return SimpleNamespace(
        additional_config={CONFIG_KEY: {"items": {"shop": str(path)}}},
        model_config=SimpleNamespace(get_vocab_size=lambda: 10),
        **{"speculative_config": None, **values},
    )


def test_catalogues_that_cannot_be_served(tmp_path, monkeypatch):
    monkeypatch.setattr(beam_support, "reason_off", lambda config: None)
    path = write(tmp_path / "items.trie", {(1, 9): 1})
    beam_support.check_catalogues(serving(path))
    larger = write(tmp_path / "larger.trie", {(1, 10): 1})
    for wrong, message in (
        (serving(tmp_path / "none"), "none: No such file"),
        (serving(larger), "it has token 10, the model's vocabulary has 10 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            beam_support.check_catalogues(wrong)
    monkeypatch.setattr(beam_support, "reason_off", lambda config: "it is switched off")
    with pytest.raises(ValueError, match=r"\['items'\] cannot be served: it is switched off"):
        beam_support.check_catalogues(serving(path))
