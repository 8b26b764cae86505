"""Folders and servers that are checked before anything starts."""

import pytest

from tests.engine.test_configuration import TREES, engine_config, refusal

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
