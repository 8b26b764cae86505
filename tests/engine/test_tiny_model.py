"""The shipped model in real engines: it loads, agrees with Hugging Face, ends its answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.tiny_model.backends import TransformersBackend
from tools.tiny_model.decoding import find_loop
from tools.tiny_model.model import ModelConfig, TinyLlama, load_model, save_model
from tools.tiny_model.prompts import HAND_PROMPTS
from vllm_trie.lab.tiny_model import model_path

transformers = pytest.importorskip("transformers", reason="compares with its Llama")

CHATS = [[{"role": role, "content": text} for role, text in p.turns] for p in HAND_PROMPTS]
CHATS = [chat for chat in CHATS if chat]


def test_training_model_equals_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=64, hidden_size=32, num_layers=2, head_size=8, intermediate_size=48
    )
    model = TinyLlama(config)
    for parameter in model.parameters():  # output matrices start at 0, which would hide errors
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    save_model(model, tmp_path)
    ours = load_model(tmp_path)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, 64, (2, 40))
    with torch.no_grad():
        logits = ours.logits(ours.hidden(ids, *ours.rotary(40)))
        torch.testing.assert_close(logits, theirs(ids).logits, atol=2e-4, rtol=1e-4)


def test_chat_answers_equal_transformers_and_end(engine: Callable[..., Any]) -> None:
    from vllm import SamplingParams

    llm = engine()
    parameters = SamplingParams(temperature=0.0, max_tokens=120)
    outputs = llm.chat(CHATS, parameters, use_tqdm=False)
    reference = TransformersBackend(model_path(), "float32")
    prompts = [output.prompt_token_ids for output in outputs]
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    ended = [output.outputs[0].finish_reason == "stop" for output in outputs]
    eos = llm.get_tokenizer().eos_token_id
    for answer, expected in zip(answers, reference.generate(prompts, 120), strict=True):
        assert [token for token in answer if token != eos] == expected
    assert sum(ended) >= 0.6 * len(ended)
    assert sum(find_loop(answer) is not None for answer in answers) <= 0.2 * len(answers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_dtypes_answer(engine: Callable[..., Any], dtype: str) -> None:
    """A short question gets an answer that ends, in either precision."""
    from vllm import SamplingParams

    code = "def first(a):\n    return a\n\ndef second(b):\n    return b + 1"
    (output,) = engine(dtype=dtype).chat(
        [{"role": "user", "content": f"What does `first` return?\n\n{code}"}],
        SamplingParams(temperature=0.0, max_tokens=60),
        use_tqdm=False,
    )
    assert output.outputs[0].text.strip()
    assert output.outputs[0].finish_reason == "stop"
