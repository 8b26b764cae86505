"""What the user may write, how vLLM gets to see it, and what is refused with which words."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from vllm.config import SpeculativeConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec

import vllm_trie
from vllm_trie.drafts import Drafter, available_methods, registry
from vllm_trie.drafts.drafter import DrafterOptions
from vllm_trie.drafts.engine.config import PROPOSER_CLASS, SPECULATOR_CLASS, read
from vllm_trie.drafts.engine.start.arguments import meant, refuse_misspelled_method
from vllm_trie.drafts.engine.start.translate import (
    DEFAULT_NODES,
    MAX_NODES,
    requested_method,
    translate,
)
from vllm_trie.hooks.start.additional_config import CONFIG_KEY
from vllm_trie.hooks.start.limits import LIMITS, problems
from vllm_trie.hooks.start.refusal import refusing_start
from vllm_trie.searches.engine import beam_support

PACKAGE = Path(vllm_trie.__file__).parent
THEIRS = ("ngram", "medusa", "suffix", "eagle", "eagle3", "draft_model", "custom_class")
TRIE = {"method": "ngram_trie"}
TIERS = "num_speculative_tokens_per_batch_size"


class SecondOptions(DrafterOptions):
    """A trained drafter."""

    head: str | None = None

    @property
    def speculator(self) -> Any:
        return self.head and SimpleNamespace(method="eagle3", model=self.head)


class Second(Drafter):
    """A method that may draft with a trained drafter of vLLM's."""

    name = "second_trie"
    Options = SecondOptions

    def propose(self, requests):
        return []


@pytest.fixture(autouse=True)
def _second():
    registry.register(Second)
    yield
    registry.unregister(Second)


def arguments(speculative: Any = None, ours: Any = None, **flags: Any) -> SimpleNamespace:
    """Return engine arguments; `ours` is the plugin's part of `additional_config`."""
    additional = None if ours is None else {CONFIG_KEY: ours}
    values = {"spec_method": None, "spec_model": None, "spec_tokens": None}
    values |= {"speculative_config": speculative, "additional_config": additional}
    return SimpleNamespace(**deepcopy(values | flags))


def settings_of(engine_args: SimpleNamespace) -> Any:
    """Return what a worker reads, after a translation that a second one does not change."""
    translate(engine_args)
    before = deepcopy(vars(engine_args))
    translate(engine_args)
    assert vars(engine_args) == before
    speculative = engine_args.speculative_config
    return read(
        SimpleNamespace(
            speculative_config=speculative and SimpleNamespace(**speculative),
            additional_config=engine_args.additional_config,
        )
    )


@pytest.mark.parametrize(
    ("speculative", "flags"),
    [
        (TRIE, {}),
        ({"model": "ngram_trie"}, {}),
        ({**TRIE, "model": "ngram_trie"}, {}),
        (None, {"spec_method": "ngram_trie"}),
        (None, {"spec_model": "ngram_trie"}),
        (None, {"spec_method": "ngram_trie", "spec_model": "ngram_trie"}),
        (TRIE, {"spec_method": "ngram_trie"}),
    ],
)
def test_all_ways_to_name_a_method(speculative, flags):
    engine_args = arguments(speculative, **flags)
    assert requested_method(engine_args) == "ngram_trie"
    settings = settings_of(engine_args)
    expected = {"method": "custom_class", "model": PROPOSER_CLASS}
    assert engine_args.speculative_config == {**expected, "num_speculative_tokens": DEFAULT_NODES}
    assert (settings.method, settings.draft_model) == ("ngram_trie", None)


@pytest.mark.parametrize(
    ("speculative", "more"),
    [
        (None, {}),
        ({"method": "ngram", "num_speculative_tokens": 4}, {}),
        ({"method": "eagle", "model": "some/model"}, {}),
        ({"method": "custom_class", "model": "theirs.Proposer"}, {}),
        (None, {"spec_method": "ngram"}),
        (None, {"additional_config": {"theirs": 1}}),
        ("no dictionary", {}),
        ('{"method": "ngram"}', {}),
        ('["ngram_trie"]', {}),
    ],
)
def test_what_is_not_ours_is_left_alone(speculative, more):
    engine_args = arguments(speculative, **more)
    before = deepcopy(vars(engine_args))
    translate(engine_args)
    assert vars(engine_args) == before
    assert requested_method(engine_args) is None
    assert settings_of(arguments()) is settings_of(arguments({"model": "ngram"})) is None


OPTIONS = {"max_context_len": 9, "draft_timeout_s": 2.0}


@pytest.mark.parametrize(
    ("speculative", "ours", "flags"),
    [
        ({**TRIE, **OPTIONS}, None, {}),
        ({**TRIE, "max-context-len": 9, "draft-timeout-s": 2.0}, None, {}),
        (TRIE, OPTIONS, {}),
        (None, OPTIONS, {"spec_method": "ngram_trie"}),
        ({**TRIE, "max_context_len": 9}, {**OPTIONS, **TRIE, "beam_search": False}, {}),
    ],
)
def test_options_arrive(speculative, ours, flags):
    settings = settings_of(arguments(speculative, ours, **flags))
    defaults = type(settings.drafter_options)()
    assert settings.drafter_options.max_context_len == 9
    assert settings.drafter_options.store_tokens == defaults.store_tokens
    assert settings.engine_options.draft_timeout_s == 2.0


def test_settings_of_others_stay_theirs():
    tiers = [(1, 8, 4), (9, 64, 2)]
    engine_args = arguments({**TRIE, TIERS: tiers, "max_context_len": 9})
    engine_args.additional_config = {"theirs": 1}
    settings_of(engine_args)
    assert engine_args.speculative_config[TIERS] == tiers
    ours = {**TRIE, "max_context_len": 9}
    assert engine_args.additional_config == {"theirs": 1, CONFIG_KEY: ours}
    engine_args = arguments(None, {"beam_search": False})
    translate(engine_args)  # those of beam search need no method
    assert engine_args.speculative_config is None


@pytest.mark.parametrize("value", [1, DEFAULT_NODES, MAX_NODES])
def test_node_budgets(value):
    for engine_args in (
        arguments({**TRIE, "num_speculative_tokens": value}),
        arguments(spec_method="ngram_trie", spec_tokens=value),
    ):
        settings_of(engine_args)
        assert engine_args.speculative_config["num_speculative_tokens"] == value


NODES, CONTEXT = "num_speculative_tokens", "max_context_len"
BEAMS = "additional_config['vllm_trie']"
REFUSALS: list[tuple[Any, Any, dict[str, Any], list[str]]] = [
    *(
        ({**TRIE, NODES: v}, None, {}, [f"{NODES}={v!r}", f"from 1 to {MAX_NODES}", "leave it out"])
        for v in (0, -1, MAX_NODES + 1, True, "8", 8.0, [8])
    ),
    *(
        (*place, {}, ["ngram_trie", f"{name}={value!r}" if words else name, *words.split("|")])
        for name, value, words in [
            ("no_such_option", 1, ""),
            (CONTEXT, "9", "integer"),
            (CONTEXT, True, "integer"),
            (CONTEXT, 9.5, "integer"),
            (CONTEXT, 0, "1"),
            (CONTEXT, 16, "15"),
            ("index_output", "yes", "boolean"),
            ("store_tokens", -1, "0"),
            ("draft_timeout_s", 0.0, "greater than 0"),
            ("draft_timeout_s", "fast", "number"),
        ]
        for place in [({**TRIE, name: value}, None), (TRIE, {name: value})]
    ),
    (TRIE, {"no_such_option": 1}, {}, ["not an option", CONTEXT, "draft_timeout_s"]),
    ({**TRIE, CONTEXT: 9}, {CONTEXT: 8}, {}, [CONTEXT, "9", "8", "differ", "give one"]),
    ({**TRIE, NODES: 8}, None, {"spec_tokens": 16}, ["--spec-tokens=16", "8", "differ"]),
    ({"method": "ngram"}, None, {"spec_method": "ngram_trie"}, ["'ngram_trie'", "'ngram'"]),
    ({"method": "eagle", "model": "ngram_trie"}, None, {}, ["='eagle'", "leave the model out"]),
    ({**TRIE, "model": "second_trie"}, None, {}, ["'second_trie'", "differ"]),
    (None, None, {"spec_method": "ngram_trie", "spec_model": "second_trie"}, ["differ"]),
    (TRIE, {"method": "other"}, {}, ["'ngram_trie'", "'other'", "differ", "give one"]),
    (TRIE, None, {"additional_config": ["a list"]}, ["additional_config", "mapping"]),
    (TRIE, 5, {}, [CONFIG_KEY, "5", "mapping"]),
    (None, "beam_search=False", {}, ["must be a mapping"]),
    ({"method": "ngram"}, "beam_search=False", {}, ["must be a mapping"]),
    ("ngram_trie", None, {}, ["'ngram_trie'", "dictionary", "{'method': 'ngram_trie'}"]),
    *(
        (f'{{"{key}": "ngram_trie", "recycle": false}}', None, {}, ["dictionary", f"write {said}"])
        for key in ("method", "model")
        for said in [f"speculative_config={{'{key}': 'ngram_trie', 'recycle': False}}"]
    ),
    ("x", None, {"spec_method": "ngram_trie"}, ["'x'", "dictionary"]),
    ({**TRIE, "model": 5}, None, {}, ["5", "path or a name"]),
    (TRIE, None, {"additional_config": {"vllm-trie": {}}}, ["write 'vllm_trie'"]),
    (TRIE, None, {"additional_config": {"beam_search": False}}, [f"{BEAMS}['beam_search']"]),
    *(
        (speculative, {option: "ngram_trie"}, {}, [f"sets {option}, but no", "--spec-method"])
        for speculative in (None, {"method": "ngram"})
        for option in ("method", "node_budget")
    ),
    *(
        (
            speculative,
            {"beam_search": v},
            {},
            [f"{BEAMS}['beam_search']={v!r}", "must be True or False"],
        )
        for speculative in (None, TRIE)
        for v in (0, 1, "false", None, {})
    ),
]


@pytest.mark.parametrize(("speculative", "ours", "more", "said"), REFUSALS)
def test_refusals(speculative, ours, more, said):
    with pytest.raises(ValueError, match=r"\w") as caught:
        translate(arguments(speculative, ours, **more))
    for words in said:
        assert words in str(caught.value)


READ_BY_METHODS = {
    "method", "model", NODES, TIERS, "target_model_config", "target_parallel_config",
}  # fmt: skip
"""vLLM's engine arguments add the last two."""


@pytest.mark.parametrize(
    "name", [f.name for f in fields(SpeculativeConfig) if f.name not in READ_BY_METHODS]
)
def test_fields_of_vllms_own_drafters_are_refused(name):
    """Also such as a release of vLLM adds: does a method of the plugin read it?"""
    default = getattr(SpeculativeConfig, name, None)
    for method in ("ngram_trie", "second_trie"):
        said = rf"sets {name}='x', which method '{method}' does not read; .* leave the others out"
        with pytest.raises(ValueError, match=said):
            translate(arguments({"method": method, name: "x"}))
        if default != 0:
            with pytest.raises(ValueError, match=f"sets {name}=0, which"):
                translate(arguments({"method": method, name: 0}))
        for left_out in (None, False, default):
            translate(arguments({"method": method, name: left_out}))
    of_head = {"method": "second_trie", "head": "some/head"}
    translate(arguments({**of_head, name: default}))
    with_head = arguments({**of_head, name: "x"})
    if name.startswith(("prompt_lookup", "suffix_decoding")):
        with pytest.raises(ValueError, match=f"sets {name}='x', which"):
            settings_of(with_head)
        return
    settings_of(with_head)
    assert with_head.speculative_config[name] == "x"


def test_a_path_is_the_drafters_own_model():
    engine_args = arguments({**TRIE, "model": "some/heads", "revision": "1234"})
    assert settings_of(engine_args).draft_model == "some/heads"
    assert engine_args.speculative_config["model"] == PROPOSER_CLASS
    assert engine_args.speculative_config["revision"] == "1234"


def test_a_trained_drafter_becomes_its_method_of_vllm():
    second = {"method": "second_trie", "head": "some/head", NODES: 24}
    engine_args = arguments({**second, "quantization": "fp8"})
    settings = settings_of(engine_args)
    vllms = {"method": "eagle3", "model": "some/head", NODES: 24}
    assert engine_args.speculative_config == {**vllms, "quantization": "fp8"}
    assert (settings.method, settings.speculator.model) == ("second_trie", "some/head")


def test_the_class_without_a_method_is_refused():
    with pytest.raises(ValueError, match=r"names no method.*ngram_trie"):
        settings_of(arguments({"method": "custom_class", "model": PROPOSER_CLASS}))


@pytest.mark.parametrize("methods", [("ngram_gpu",), ("ngram_gpu", "custom_speculator")])
def test_methods_of_v2(methods, monkeypatch):
    """The second is that of a patched vLLM."""
    from vllm.config import speculative as vllms

    monkeypatch.setattr(vllms, "SpeculativeMethod", Literal[methods])
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    engine_args = arguments(TRIE)
    assert settings_of(engine_args).method == "ngram_trie"
    assert requested_method(engine_args) == "ngram_trie"
    assert engine_args.speculative_config["method"] == methods[-1]
    assert engine_args.speculative_config["model"] == SPECULATOR_CLASS


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("ngram_tri", "ngram_trie"),
        ("ngram-trie", "ngram_trie"),
        ("NGram_Trie", "ngram_trie"),
        ("ngramtree", "ngram_trie"),
        ("second", "second_trie"),
        ("2nd-trie", "second_trie"),
    ],
)
def test_what_was_meant(name, method):
    assert meant(name, THEIRS) == method


@pytest.mark.parametrize(
    "name", [*THEIRS, *available_methods(), "ngrm", "eagle4", "medusa2", "no_such", "", None, 7]
)
def test_what_is_vllms_to_answer(name):
    assert meant(name, THEIRS) == ""


@pytest.mark.parametrize(
    "way",
    [
        {"speculative": {"method": "ngram_tri"}},
        {"speculative": {"model": "ngram_tri"}},
        {"spec_method": "ngram_tri"},
        {"spec_model": "ngram_tri"},
        {"speculative": {NODES: 4}, "spec_method": "ngram_tri"},
    ],
)
def test_misspelled_methods_are_refused(way):
    with pytest.raises(ValueError, match="'ngram_tri' is unknown; did you mean") as caught:
        refuse_misspelled_method(arguments(**way))
    assert all(method in str(caught.value) for method in available_methods())


def test_what_is_left_to_vllm(tmp_path, monkeypatch):
    (tmp_path / "ngram_tri").mkdir()
    monkeypatch.chdir(tmp_path)  # a folder of that name is a model
    for speculative in (
        None, {"method": "ngram"}, {"method": "eagel"}, {"model": "someone/ngram-trie-7b"},
        {"method": "draft_model", "model": "ngram_tri"}, {"model": "gpt2"}, "ngram_tri",
        {"method": 3}, {"model": "ngram_tri"},
    ):  # fmt: skip
        refuse_misspelled_method(arguments(speculative))


def test_bugs_keep_their_traceback_where_refusals_become_a_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["/usr/bin/vllm", "serve", "model"])
    with pytest.raises(SystemExit) as ended, refusing_start():
        translate(arguments({**TRIE, "store_tokens": "many"}))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("vllm serve: error: options of method 'ngram_trie': store_tokens='many'")
    assert said.count("\n") == 1
    with pytest.raises(ValueError, match="invalid literal"), refusing_start():
        int("no number")
    assert not capsys.readouterr().err


def test_the_checks_raise_what_is_shown_as_a_line():
    folders = ("hooks/start", "drafts/engine/start", "searches/engine")
    checks = [path for folder in folders for path in (PACKAGE / folder).glob("*.py")]
    assert len(checks) > 20
    others = {path.name for path in checks if "raise ValueError" in path.read_text()}
    assert others <= {"verifier_setup.py"}  # of workers, which show no lines


@pytest.mark.parametrize(
    ("cache_dtype", "quantization", "is_refused"),
    [
        ("auto", {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, True),
        ("float32", {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, False),
        ("auto", {"kv_cache_scheme": None}, False),
        ("auto", None, False),
        ("fp8", None, True),
    ],
)
def test_trees_on_cpus_need_a_cache_that_is_not_quantized(cache_dtype, quantization, is_refused):
    """A checkpoint of llm-compressor's may quantize it, too: its drafts are chains."""
    engine: Any = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(quantization_config=quantization), architectures=()
        ),
    )
    (limit,) = (limit for limit in LIMITS if limit.condition.startswith("a quantized KV cache"))
    assert ("kv_cache_dtype='fp8'" in (limit.message(engine) or "")) == is_refused


@pytest.mark.parametrize(("value", "is_off"), [("1", True), ("0", False), (None, False)])
def test_vllms_front_end_in_rust_has_no_native_searches(value, is_off, monkeypatch):
    monkeypatch.delenv("VLLM_USE_RUST_FRONTEND", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", value)
    searches: Any = SimpleNamespace(additional_config={CONFIG_KEY: {"beam_search": False}})
    assert ("VLLM_USE_RUST_FRONTEND=1" in next(problems("beams", searches))) == is_off


@pytest.mark.parametrize(
    ("method", "num_groups", "is_v2", "is_off"),
    [
        ("eagle", 2, True, True),
        ("eagle", 1, True, False),
        ("dflash", 1, True, True),
        ("ngram", 2, True, False),
        ("dflash", 2, False, False),
    ],
)
def test_beams_beside_drafters_that_write_behind_them(method, num_groups, is_v2, is_off):
    group = SimpleNamespace(
        kv_cache_spec=FullAttentionSpec(
            block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
    )
    engine: Any = SimpleNamespace(
        use_v2_model_runner=is_v2,
        num_lookahead_tokens=4 * (method != "ngram"),
        speculative_config=SimpleNamespace(method=method, parallel_drafting=method == "dflash"),
    )
    cache: Any = SimpleNamespace(kv_cache_groups=[group] * num_groups)
    assert (beam_support.cache_reason(engine, cache) is not None) == is_off
