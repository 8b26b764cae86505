"""Models and helpers of the beam search tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from tests.engine.beam.cases import source_token_ids
from tests.engine.beam.oracle import make_eos_heavy_model


@pytest.fixture(scope="session")
def eos_heavy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with a likely EOS."""
    folder = tmp_path_factory.mktemp("eos_heavy")
    return make_eos_heavy_model(folder, source_token_ids()[:4096])
