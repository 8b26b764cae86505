"""Medusa drafting changes no output, and drafts from the right hidden state."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner
from vllm import SamplingParams

from tests.engine.compare import generate, speculation
from tests.engine.prompts import prompts
from vllm_trie.extras.heads.reading import CheckpointError, load_checkpoint
from vllm_trie.lab.local_engine import verifier_of
from vllm_trie.lab.tiny_model import medusa_path, model_path

GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, detokenize=False)


def medusa(num_nodes: int = 32, **options) -> dict:
    return speculation("medusa_dynamic", num_nodes, model=str(medusa_path()), **options)


def test_state_given_is_that_of_the_whole_text(engine, monkeypatch):
    """What the drafter gets equals a plain forward pass over the tokens that are committed."""
    from transformers import LlamaModel

    llm = engine(**medusa())
    drafter = verifier_of(llm).guard.drafter
    seen = []
    stock = type(drafter).propose

    def propose(self, requests):
        seen.extend((r.token_ids.tolist(), r.hidden_state.clone()) for r in requests)
        return stock(self, requests)

    monkeypatch.setattr(type(drafter), "propose", propose)
    generate(llm, prompts(10), GREEDY)
    model = LlamaModel.from_pretrained(model_path(), dtype=torch.float32)
    assert len(seen) > 20
    for tokens, hidden in seen[::3]:
        # The last token was sampled from the state of the one before it.
        ids = torch.tensor([tokens[:-1]])
        with torch.no_grad():
            reference = model(ids).last_hidden_state[0, -1]
        torch.testing.assert_close(hidden, reference, rtol=1e-3, atol=1e-3)


def test_heads_of_another_model_are_refused(engine, tmp_path):
    from tests.extras.heads.unit.support import random_heads
    from vllm_trie.extras.heads.training.writing import save_vllm

    save_vllm(random_heads(), tmp_path)
    with pytest.raises(CheckpointError, match="another"):
        engine(**speculation("medusa_dynamic", 8, model=str(tmp_path)))


def test_training_on_the_models_answers(tmp_path):
    """Heads on the model's own output layer, over several epochs, that an engine can load."""
    from safetensors import safe_open

    from vllm_trie.cli import app

    lines = [
        {"question": f"Write {n} lines.", "token_ids": list(range(20 + n, 60 + n))}
        for n in range(8)
    ]
    data, out = tmp_path / "answers.jsonl", tmp_path / "heads"
    data.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["medusa", "train", "--model", str(model_path()), "--data", str(data)]
    arguments += ["--out", str(out), "--share-output", "--outputs", "40", "--dtype", "bfloat16"]
    arguments += ["--steps", "12", "--batch", "2", "--context", "64"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert not list(out.glob("*.cache"))
    config = json.loads((model_path() / "config.json").read_text())
    with safe_open(str(model_path() / "model.safetensors"), "pt") as tensors:
        output = tensors.get_tensor("model.embed_tokens.weight")
    heads = load_checkpoint(out, config["hidden_size"], config["vocab_size"], lambda: output).heads
    assert set(heads.token_map.tolist()) <= set(range(20, 68)) | {0}
    torch.testing.assert_close(heads.output_weight[0], output[heads.token_map])
