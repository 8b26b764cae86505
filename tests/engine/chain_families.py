"""Tiny checkpoints of the architectures that chains serve, with random weights.

Transformers writes them, so vLLM's own code for the family loads and runs them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

VOCABULARY = 128
WINDOW = 32
"""Tokens of a sliding window or an attention chunk; prompts and outputs are longer."""
CYCLE = 8
LOGITS_SCALE = 0.05
"""Standard deviation of the head's weights: the likeliest token has no probability of 1."""

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_FOUR_LAYERS: dict[str, Any] = {**_SMALL, "num_hidden_layers": 4}
_SIX_LAYERS: dict[str, Any] = {**_SMALL, "num_hidden_layers": 6}
_VISION: dict[str, Any] = {
    "depth": 1,
    "num_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 128,
}
_VISION_TOKENS: dict[str, Any] = {
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "image_token_id": 5,
    "video_token_id": 6,
}
_MROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [4, 6, 6],
}
_TEXT_ONLY: dict[str, Any] = {"limit_mm_per_prompt": {"image": 0, "video": 0}}


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        config: Values of its Transformers configuration.
        embedding_std: Standard deviation of the embeddings. Large ones make the output repeat
            itself, small ones leave it to the layers; in between, drafts are accepted and rejected.
        engine: Options that its engines need.
    """

    config: dict[str, Any]
    embedding_std: float = 5.0
    engine: dict[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "Qwen 2": Family({"model_type": "qwen2", **_SMALL}),
    "Phi 3": Family({"model_type": "phi3", **_SMALL}),
    "Mistral": Family({"model_type": "mistral", "sliding_window": WINDOW, **_SMALL}),
    "Gemma 2": Family(
        {
            "model_type": "gemma2",
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 32,
            **_FOUR_LAYERS,
        },
        embedding_std=0.04,
    ),
    "Gemma 3": Family(
        {"model_type": "gemma3_text", "sliding_window": WINDOW, **_SIX_LAYERS},
        embedding_std=0.02,
    ),
    "Gemma 4": Family(
        {
            "model_type": "gemma4_text",
            "sliding_window": WINDOW,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
            **_SIX_LAYERS,
        },
        embedding_std=0.06,
    ),
    "gpt-oss": Family(
        {
            "model_type": "gpt_oss",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            **_FOUR_LAYERS,
        },
    ),
    "Llama 4": Family(
        {
            "model_type": "llama4_text",
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "moe_layers": [1, 3],
            "no_rope_layers": [1, 1, 1, 0],
            "attention_chunk_size": WINDOW,
            **_FOUR_LAYERS,
        },
    ),
    "Qwen 2.5 VL": Family(
        {
            "model_type": "qwen2_5_vl",
            "text_config": {"model_type": "qwen2_5_vl_text", "rope_parameters": _MROPE, **_SMALL},
            "vision_config": {**_VISION, "patch_size": 14, "fullatt_block_indexes": [0]},
            **_VISION_TOKENS,
        },
        engine=_TEXT_ONLY,
    ),
    "Qwen 3 VL": Family(
        {
            "model_type": "qwen3_vl",
            "text_config": {
                "model_type": "qwen3_vl_text",
                "rope_parameters": {**_MROPE, "mrope_interleaved": True},
                **_SMALL,
            },
            "vision_config": {
                **_VISION,
                "patch_size": 16,
                "deepstack_visual_indexes": [0],
                "num_position_embeddings": 64,
            },
            **_VISION_TOKENS,
        },
        embedding_std=4.0,
        engine=_TEXT_ONLY,
    ),
}
"""Families whose chains give plain vLLM's output, and a KV cache of another type.

DeepSeek V2 and V3 are absent because plain vLLM's latent attention on CPUs depends on the other
requests of the batch, in float32 too, and differs from Transformers' at the first token.
"""

if torch.cpu._is_avx512_supported():  # as vLLM's kernels for these types demand
    FAMILIES["fp8 KV cache"] = Family(
        {"model_type": "qwen2", **_SMALL}, engine={"kv_cache_dtype": "fp8"}
    )

_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
RECURRENT: dict[str, dict[str, Any]] = {
    "Qwen 3 Next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        **_DELTA_NET,
        **_FOUR_LAYERS,
    },
    "Qwen 3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **_DELTA_NET,
        **_FOUR_LAYERS,
    },
    "Falcon H1": {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "mamba_d_ssm": 256,
        **_MAMBA2,
        **_SMALL,
    },
    "Nemotron H": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "ssm_state_size": 16,
        **_FOUR_LAYERS,
    },
    "Zamba 2": {
        "architectures": ["Zamba2ForCausalLM"],
        "model_type": "zamba2",
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"],
        "num_mem_blocks": 1,
        "n_mamba_heads": 8,
        "mamba_headdim": 32,
        "mamba_ngroups": 1,
        "mamba_d_state": 16,
        "attention_head_dim": 64,
        "attention_hidden_size": 256,
        **_FOUR_LAYERS,
    },
    "LFM 2": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "conv_dim": 128,
        "conv_dim_out": 128,
        **_FOUR_LAYERS,
    },
    "Mamba 2": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "num_heads": 8,
        "state_size": 16,
        "n_groups": 1,
        **_SMALL,
    },
}
"""Families with recurrent state, which no drafts can be verified for.

vLLM's own `ngram` damages their state on CPUs or ends the engine: the convolution's state does not
return to the last accepted token, `mamba_cache_mode="align"` needs Triton, and a step without
drafts after one with accepted ones reads an old state (vllm-project/vllm#39273, #52942). Jamba,
Mamba and Falcon Mamba do not run on CPUs at all, where `selective_scan_fwd` is missing.
"""


def write_model(folder: Path, family: Family) -> str:
    """Write a family's checkpoint with random weights.

    The head's rows are the embeddings moved on by one token within cycles of `CYCLE` tokens, so
    that a model without layers would repeat the cycle of the last token forever. Tied embeddings
    repeat the last token instead.

    Returns:
        The folder.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(**family.config)
    seeing = "vision_config" in family.config
    model_class = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    model = model_class.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if weight.dim() >= 2 and "visual" not in name:
            std = family.embedding_std if "embed" in name else 0.2
            torch.nn.init.normal_(weight, std=std)
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is not embeddings.weight:
        order = torch.arange(VOCABULARY).view(-1, CYCLE).roll(1, dims=1).flatten()
        scale = LOGITS_SCALE / family.embedding_std
        head.weight.data.copy_(scale * embeddings.weight.data[order])
    model.save_pretrained(folder)
    return str(folder)


def positions_with_image(
    model: Any, input_tokens: Sequence[int], mm_features: Any
) -> tuple[torch.Tensor, int]:
    """Positions in time, height and width as if the first 16 tokens were an image of 4 by 4."""
    patches = torch.arange(16)
    image = torch.stack([torch.zeros_like(patches), patches // 4, patches % 4])
    text = torch.arange(4, 4 + len(input_tokens) - 16).expand(3, -1)
    return torch.cat([image, text], dim=1), 4 - 16


def stand_in_for_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen-VL's modules import torchvision, for pixels only; the CPU set-up lacks it."""
    if find_spec("torchvision") is not None:
        return
    parent = None
    for name in ("torchvision", "transforms", "v2", "functional"):
        module = ModuleType(name if parent is None else f"{parent.__name__}.{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if parent is not None:
            setattr(parent, name, module)
        parent = module


def take_text_for_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Qwen-VL's models take prompts of text for images, as far as positions go."""
    stand_in_for_torchvision(monkeypatch)
    for name in (
        "qwen2_5_vl.Qwen2_5_VLForConditionalGeneration",
        "qwen3_vl.Qwen3VLForConditionalGeneration",
    ):
        target = f"vllm.model_executor.models.{name}.get_mrope_input_positions"
        monkeypatch.setattr(target, positions_with_image)
