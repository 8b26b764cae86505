"""Options of requests and of the engine: what is refused, and what is said."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError

from tests.extras.items.unit.catalogues import write
from tests.unit.hooks.test_hypotheses import LENGTHS, answer, as_a_search, tokenizer
from tests.unit.hooks.test_hypotheses import patched as patched
from tests.unit.hooks.test_request_options import check, served_params
from vllm_trie.extras.items import start
from vllm_trie.extras.items.build import build_items
from vllm_trie.extras.items.options import ItemOptions
from vllm_trie.extras.items.sources import read_items
from vllm_trie.files.tokenizers import fingerprint
from vllm_trie.hooks.start.additional_config import CONFIG_KEY
from vllm_trie.searches import parse_options

PREFIXES = f"[{','.join(['[' + '-1,' * 20 + '-1]'] * 4000)}]"
"""84,000 wrong tokens, in a size that is allowed."""


@pytest.mark.parametrize("name", ["items", "allow_items", "deny_items", "normalize"])
def test_half_of_a_surrogate_pair_is_refused_by_name(name):
    text = "\ud800"
    value = [text] if name.endswith("_items") else text
    with pytest.raises(ValueError, match=rf"{name}: .*\\ud800"):
        parse_options(ItemOptions, {"items": "a", name: value})


@pytest.mark.parametrize(
    "value",
    [["x"] * 100_000, "x" * 10**6, "9" * 10**6, [0.5] * 100_000, PREFIXES],
    ids=["strings", "string", "digits", "numbers", "prefixes"],
)
@pytest.mark.parametrize("name", sorted(ItemOptions.model_fields.keys() - {"items"}))
def test_a_large_wrong_value_is_refused_at_once(name, value):
    begin = time.process_time()
    with pytest.raises(ValueError, match=name) as error:
        parse_options(ItemOptions, {"items": "a", name: value})
    assert time.process_time() - begin < 0.2
    assert len(str(error.value)) < 1000


def test_options_of_the_plugin_have_a_limit_next_to_custom_processors():
    check({"items": "a"})
    with pytest.raises(VLLMClientError, match=r"has a size of \d+ .*'items'"):
        check({"items": "x" * 300_000}, "package:Processor")


def serving(items: object, **values: Any) -> Any:
    return SimpleNamespace(
        additional_config={CONFIG_KEY: {"items": items}},
        model_config=SimpleNamespace(get_vocab_size=lambda: 10),
        **{"speculative_config": None, **values},
    )


@pytest.mark.parametrize("items", ["path", ["path"], {"name": 3}, {"name": ""}, {3: "path"}, None])
def test_catalogues_are_paths_by_name(items):
    with pytest.raises(ValueError, match=r"\['items'\]=.* must map names to paths"):
        start.check_catalogues(serving(items))


def test_catalogues_that_cannot_be_served(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "reason_off", lambda config: None)
    path = write(tmp_path / "items.trie", {(1, 9): 1})
    start.check_catalogues(serving({"shop": str(path)}))
    larger = write(tmp_path / "larger.trie", {(1, 10): 1})
    for wrong, message in (
        (tmp_path / "none", "none: No such file"),
        (larger, "it has token 10, the model's vocabulary has 10 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            start.check_catalogues(serving({"shop": str(wrong)}))
    monkeypatch.setattr(start, "reason_off", lambda config: "it is switched off")
    with pytest.raises(ValueError, match=r"\['items'\] cannot be served: it is switched off"):
        start.check_catalogues(serving({"shop": str(path)}))


def test_a_catalogue_of_another_tokenizer_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "reason_off", lambda config: None)

    def load(*given: object) -> SimpleNamespace:
        return SimpleNamespace(vocabulary={" ".join(map(str, given)): 1})

    monkeypatch.setattr(start, "load_tokenizer", load)
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"id": 5, "tokens": [1, 2]}')
    build_items(tmp_path / "items", read_items(lines), fingerprint({"theirs 12 True": 1}))
    config = serving({"shop": str(tmp_path / "items")})
    config.model_config.tokenizer, config.model_config.skip_tokenizer_init = "ours", False
    config.model_config.tokenizer_revision, config.model_config.trust_remote_code = "12", True
    with pytest.raises(ValueError, match="built with another tokenizer than the model's"):
        start.check_catalogues(config)
    config.model_config.tokenizer = "theirs"
    start.check_catalogues(config)
    config.model_config.tokenizer, config.model_config.skip_tokenizer_init = None, True
    start.check_catalogues(config)


def test_defaults_of_the_server_do_not_act_on_items(monkeypatch):
    search = {"beam_width": 2, "items": "shop"}
    params = served_params(monkeypatch, search)
    assert (params.repetition_penalty, params.frequency_penalty, params.min_p) == (1.0, 0.0, 0.0)
    with pytest.raises(VLLMClientError, match=r"repetition_penalty=1\.1 .* with items"):
        served_params(monkeypatch, search, repetition_penalty=1.1)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("items_end", ["complete", "eos"])
def test_the_text_of_an_item_is_whole(items_end):
    """Only EOS behind it is no part of the text, as in Hugging Face's of the same tokens."""
    extra_args = {"beam_width": 4, "items": "catalogue", "items_end": items_end}
    params = SamplingParams(n=len(LENGTHS), extra_args=extra_args)
    [result] = as_a_search(params)
    output, tokens = result.outputs[1], answer(None)[0][1]
    assert output.finish_reason == "stop"
    assert output.token_ids == tokens
    assert output.text == tokenizer().decode(tokens if items_end == "complete" else tokens[:-1])
