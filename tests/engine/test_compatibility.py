"""The table of families on the compatibility page is what start-up chooses on both runners."""

from __future__ import annotations

from typing import Any

import pytest
import vllm
from transformers import Blip2Config
from vllm import envs
from vllm.engine.arg_utils import EngineArgs

from tests.engine.families import (
    FAMILIES,
    RECURRENT,
    VARIANTS,
    stand_in_for_torchvision,
    write_config,
)
from tests.processes import ROOT
from vllm_trie.drafts.engine import config

pytestmark = pytest.mark.usefixtures("inspect_models_here")

PAGE = ROOT / "docs" / "compatibility.md"
_BLIP_2 = {
    **Blip2Config(text_config={"model_type": "opt", "vocab_size": 64}).to_dict(),
    "architectures": ["Blip2ForConditionalGeneration"],
}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


def configs(*names: str) -> list[dict[str, Any]]:
    return [FAMILIES[name].config for name in names]


CONFIGURATIONS: dict[str, list[dict[str, Any]]] = {
    "Llama": configs("Llama"),
    "Qwen 2 and 3": configs("Qwen 3", "Phi", "Cohere", "GPT-2", "OPT"),
    "mixtures of experts": configs("Mixtral", "Qwen 3 MoE"),
    "scaled rotary positions": [VARIANTS["yarn"].config],
    "linear biases": [{"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4}],
    "quantized weights": [{**FAMILIES["Qwen 2"].config, "quantization_config": _GPTQ}],
    "text decoders with images": [_BLIP_2],
    "other decoders": configs("GPT-NeoX"),
    "sliding windows": [
        *configs("Mistral", "Gemma 2", "Gemma 3", "Gemma 4"),
        {**FAMILIES["Phi 3"].config, "sliding_window": 32},
    ],
    "attention sinks": configs("gpt-oss", "Gemma 2"),
    "attention in chunks": configs("Llama 4"),
    "multimodal rotary positions": configs("Qwen 2.5 VL", "Qwen 3 VL"),
    "multi-head latent attention": configs("DeepSeek V2"),
    "state-space": configs(*RECURRENT),
    "encoder and decoder": configs("Whisper"),
    "embedding": configs("BERT"),
}
"""By the words that a row begins with."""


def rows() -> dict[str, str]:
    """The drafts of each row, by the words of `CONFIGURATIONS`."""
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("| family | drafts |")[2].partition("\n\n")[0]
    cells: dict[str, str] = {}
    for line in table.splitlines()[2:]:
        family, drafts, _ = (cell.strip() for cell in line.strip("|").split("|"))
        # One of them begins like another.
        name = max((n for n in CONFIGURATIONS if family.startswith(n)), key=len, default=family)
        cells[name] = drafts
    return cells


def chosen(model: str, verification: str) -> str:
    """What start-up makes of a model: `tree`, `chain` or `refused`."""
    options = {"method": "ngram_trie", "num_speculative_tokens": 4, "verification": verification}
    arguments = EngineArgs(
        model=model, skip_tokenizer_init=True, max_model_len=32, speculative_config=options
    )
    try:
        return config.verification(arguments.create_engine_config())
    except ValueError as error:
        if "cannot run with this configuration" not in str(error):
            raise
        return "refused"


def test_every_row_has_configurations():
    assert rows().keys() == CONFIGURATIONS.keys()


@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_cells(family, tmp_path, monkeypatch):
    # The CPU build has no Triton, which V2 needs.
    monkeypatch.setattr(vllm.config.vllm, "HAS_TRITON", True)
    # vLLM looks at the classes of models whose description is not in its cache.
    stand_in_for_torchvision(monkeypatch)
    for number, values in enumerate(CONFIGURATIONS[family]):
        model = write_config(tmp_path / str(number), values)
        drafts = rows()[family]
        for is_v2 in (False, True):
            # Where an engine has run, vLLM reads no environment variable any more.
            monkeypatch.setitem(vars(envs), "VLLM_USE_V2_MODEL_RUNNER", is_v2)
            by_default = "chain" if is_v2 and drafts == "tree" else drafts
            assert chosen(model, "auto") == by_default, values
            if drafts == "tree":
                assert chosen(model, "tree") == "tree", values
            elif drafts == "chain":
                assert chosen(model, "tree") == "refused", values
