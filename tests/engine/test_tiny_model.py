"""The shipped model in real engines: it loads, agrees with Hugging Face, ends its answers."""

import json

import pytest
import torch

from tests.checkout import ROOT
from vllm_trie.lab.tiny_model import model_path

transformers = pytest.importorskip("transformers", reason="compares with its Llama")

CODE_PROMPTS = ROOT / "benchmarks" / "support" / "code_prompts.json"


def test_chat_answers_equal_transformers_and_end(engine):
    from vllm import SamplingParams

    llm = engine()
    written = json.loads(CODE_PROMPTS.read_text())
    chats = (written["edit"] + written["question"] + written["write"])[::2]
    outputs = llm.generate(chats, SamplingParams(temperature=0.0, max_tokens=120), use_tqdm=False)
    model = transformers.LlamaForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    for output in outputs:
        prompt = torch.tensor([output.prompt_token_ids])
        expected = model.generate(prompt, do_sample=False, max_new_tokens=120)[0]
        assert list(output.outputs[0].token_ids) == expected[prompt.shape[1] :].tolist()
    ended = [output.outputs[0].finish_reason == "stop" for output in outputs]
    assert sum(ended) >= 0.6 * len(ended)
