"""Configurations that a trained drafter cannot draft in are refused, each with what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_trie.drafts.engine.config import EngineOptions
from vllm_trie.extras.union.options import NeuralOptions

EAGLE = NeuralOptions(method="eagle", model="some/head")


def configuration(**changes: Any) -> Any:
    """Return a configuration that it can draft in, but for changes named PART__SETTING."""
    parts: dict[str, Any] = {
        "speculative_config": SimpleNamespace(
            method="eagle",
            use_gemma4_mtp=lambda: False,
            use_step3p5_mtp=lambda: False,
            use_multi_module_mtp=lambda: False,
            draft_model_config=SimpleNamespace(uses_mrope=False, architectures=["NewModel"]),
            parallel_drafting=False,
            draft_sample_method="greedy",
            rejection_sample_method="standard",
            use_local_argmax_reduction=False,
            enable_adaptive_verification=False,
            use_heterogeneous_vocab=False,
        ),
        "parallel_config": SimpleNamespace(
            data_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1
        ),
        "model_config": SimpleNamespace(supports_multimodal_inputs=False),
        "kv_transfer_config": None,
        "use_v2_model_runner": True,
    }
    for name, value in changes.items():
        part, _, setting = name.partition("__")
        if setting:
            setattr(parts[part], setting, value)
        else:
            parts[part] = value
    return SimpleNamespace(**parts)


def test_what_it_can_draft_in_passes():
    EAGLE.check(configuration(), EngineOptions(verification="tree"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculative_config__use_multi_module_mtp": lambda: True}, "several modules"),
        ({"speculative_config__method": "dflash"}, "'some/head' for method 'dflash'"),
        ({"speculative_config__use_gemma4_mtp": lambda: True}, "vLLM's own method 'mtp'"),
        ({"use_v2_model_runner": False}, "need V2.*vLLM's own method 'eagle'"),
        ({"parallel_config__data_parallel_size": 2}, "data_parallel_size=2.*set it to 1"),
        ({"parallel_config__tensor_parallel_size": 4}, "tensor_parallel_size=4.*set it to 1"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size=2.*set it to 1"),
        ({"kv_transfer_config": object()}, "leave the setting out"),
        ({"model_config__supports_multimodal_inputs": True}, "use a text model"),
        ({"speculative_config__parallel_drafting": True}, "by NewModel .* allowed: DFlashDraft"),
        ({"speculative_config__draft_sample_method": "probabilistic"}, "set it to 'greedy'"),
    ],
)
def test_others_are_refused(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        EAGLE.check(configuration(**changes), EngineOptions())
    assert "trie_union cannot run with {'method': 'eagle'}" in str(caught.value)


def test_a_vocabulary_of_its_own_is_refused_and_not_the_runner_that_vllm_takes_for_it():
    changes = {"speculative_config__use_heterogeneous_vocab": True, "use_v2_model_runner": False}
    with pytest.raises(ValueError, match="use_heterogeneous_vocab=True is not supp") as caught:
        EAGLE.check(configuration(**changes), EngineOptions())
    assert "V1" not in str(caught.value)


def test_vllm_makes_it_for_the_positions_that_it_predicts():
    """Its CUDA graphs are for as many passes, and go unused in steps of others."""
    tiers = [(1, 8, 24)]
    engine = configuration(
        num_speculative_tokens=24, speculative_config__num_speculative_tokens_per_batch_size=tiers
    )
    made_with = EAGLE.configuration(engine).speculative_config
    assert made_with.num_speculative_tokens == EAGLE.num_speculative_tokens
    assert made_with.num_speculative_tokens_per_batch_size is None
    assert engine.speculative_config.num_speculative_tokens_per_batch_size == tiers
