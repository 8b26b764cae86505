"""Models and helpers of the beam search tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from tests.engine.beam.cases import source_token_ids
from tests.engine.beam.oracle import make_eos_heavy_model
from vllm_trie.lab.tiny_model import model_path


@pytest.fixture(scope="session")
def eos_heavy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with a likely EOS."""
    folder = tmp_path_factory.mktemp("eos_heavy")
    return make_eos_heavy_model(folder, source_token_ids()[:4096])


@pytest.fixture(scope="session")
def vllm_config() -> Any:
    """Configuration of the simulated engines."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model_path()), dtype="float32", enforce_eager=True, max_model_len=512
    ).create_engine_config()
