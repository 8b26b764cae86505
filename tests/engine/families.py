"""Tiny configurations of model families: those that tree speculation serves, and those not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_WITH_ROTARY: dict[str, Any] = {**_SMALL, "vocab_size": 128, "hidden_size": 128}
_WITHOUT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

SUPPORTED: dict[str, dict[str, Any]] = {
    "Llama": {"model_type": "llama", **_WITH_ROTARY},
    "Qwen 2": {"model_type": "qwen2", **_WITH_ROTARY},
    "Qwen 3": {"model_type": "qwen3", "head_dim": 32, **_WITH_ROTARY},
    "Mistral without a window": {"model_type": "mistral", "sliding_window": None, **_WITH_ROTARY},
    "Gemma": {"model_type": "gemma", "head_dim": 32, **_WITH_ROTARY},
    "Phi 3": {"model_type": "phi3", "pad_token_id": 0, **_WITH_ROTARY},
    "Granite": {"model_type": "granite", **_WITH_ROTARY},
    "OLMo 2": {"model_type": "olmo2", **_WITH_ROTARY},
    "GPT-2": {
        "model_type": "gpt2",
        "vocab_size": 128,
        "n_embd": 128,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "OPT": {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 128, **_WITHOUT},
    "GPT-NeoX": {"model_type": "gpt_neox", "intermediate_size": 96, **_WITHOUT},
}
"""Values of a Transformers configuration, by family."""

UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "sliding window": (
        {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": 32,
            **_SMALL,
        },
        "sliding-window",
    ),
    "sliding window in some layers": (
        {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "head_dim": 16,
            "sliding_window": 32,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 16,
            **_SMALL,
        },
        "sliding-window",
    ),
    "latent attention": (
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "kv_lora_rank": 32,
            "q_lora_rank": None,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 2,
            **_SMALL,
        },
        "MLA",
    ),
    "state space": (
        {
            "architectures": ["MambaForCausalLM"],
            "model_type": "mamba",
            "state_size": 8,
            "conv_kernel": 4,
            "expand": 2,
            "time_step_rank": 4,
            "layer_norm_epsilon": 1e-5,
            **_SMALL,
        },
        "state-space",
    ),
    "multimodal positions": (
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 3, 3],
            },
            **_SMALL,
        },
        "M-RoPE",
    ),
    "encoder and decoder": (
        {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            "d_model": 64,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "max_target_positions": 256,
            "max_source_positions": 256,
            **_SMALL,
        },
        "encoder-decoder",
    ),
    "embeddings": (
        {"architectures": ["BertModel"], "model_type": "bert", **_SMALL},
        "does not generate",
    ),
}


def write_config(folder: Path, values: dict[str, Any]) -> str:
    """Path of a model folder that holds a configuration and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)
