"""Folders and servers that are checked before anything starts."""

import pytest

from tests.engine.families import with_own_tokenizer
from tests.engine.test_configuration import TREES, engine_config, refusal
from vllm_trie.drafts.engine.start.verifier_setup import drafter_context
from vllm_trie.extras.memory.warm_start import engine_identity

pytestmark = pytest.mark.usefixtures("inspect_models_here")


def test_a_store_path_that_is_no_folder(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below", tmp_path / "no" / "folder", ""):
        said = refusal(speculative_config={**TREES, "store_path": str(path)})
        assert f"store_path={str(path)!r} must be a folder" in said
    new = tmp_path / "new"
    engine_config(speculative_config={**TREES, "store_path": str(new)})
    assert not new.exists()
    said = refusal(speculative_config={**TREES, "store_path": str(new), "store_tokens": 0})
    assert "store_path: method 'ngram_trie' with these options keeps no texts" in said
    said = refusal(speculative_config={**TREES, "store_reload_minutes": 5})
    assert "store_reload_minutes=5 has no effect since 0.5" in said
    said = refusal(speculative_config={"method": "lookahead_trie", "store_path": str(new)})
    assert "store_path: method 'lookahead_trie' with these options keeps no texts" in said


def test_a_model_with_code_and_a_revision_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    model = with_own_tokenizer(tmp_path / "model")
    config = engine_config(model=model, trust_remote_code=True, revision="12")
    identity = engine_identity(drafter_context(config, None))
    assert identity.model == f"{model} 12"
    assert identity.tokenizer
