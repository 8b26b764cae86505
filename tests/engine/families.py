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

_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
_SHARED_EXPERT: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
_GPT2_NAMES: dict[str, Any] = {
    "vocab_size": 128,
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DEFAULT_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}

SUPPORTED: dict[str, dict[str, Any]] = {
    "Llama": {"model_type": "llama", **_WITH_ROTARY},
    "Qwen 2": {"model_type": "qwen2", **_WITH_ROTARY},
    "Qwen 3": {"model_type": "qwen3", "head_dim": 32, **_WITH_ROTARY},
    "Mistral without a window": {"model_type": "mistral", "sliding_window": None, **_WITH_ROTARY},
    "Ministral 3": {
        "model_type": "ministral3",
        "head_dim": 32,
        "sliding_window": None,
        **_WITH_ROTARY,
    },
    "Gemma": {"model_type": "gemma", "head_dim": 32, **_WITH_ROTARY},
    "Phi": {"model_type": "phi", "partial_rotary_factor": 0.5, **_WITH_ROTARY},
    "Phi 3": {"model_type": "phi3", "pad_token_id": 0, **_WITH_ROTARY},
    "Granite": {"model_type": "granite", **_WITH_ROTARY},
    "OLMo 2": {"model_type": "olmo2", **_WITH_ROTARY},
    "GLM 4": {"model_type": "glm4", "head_dim": 32, "pad_token_id": 0, **_WITH_ROTARY},
    "Cohere": {"model_type": "cohere", "logit_scale": 0.5, **_WITH_ROTARY},
    "StableLM": {
        "model_type": "stablelm",
        "partial_rotary_factor": 0.5,
        "use_qkv_bias": True,
        **_WITH_ROTARY,
    },
    "SmolLM 3": {
        "model_type": "smollm3",
        "no_rope_layers": [1, 0],
        "pad_token_id": 0,
        **_WITH_ROTARY,
    },
    "StarCoder 2": {"model_type": "starcoder2", "sliding_window": None, **_WITH_ROTARY},
    "Nemotron": {"model_type": "nemotron", "head_dim": 32, **_WITH_ROTARY},
    "ERNIE 4.5": {"model_type": "ernie4_5", "head_dim": 32, **_WITH_ROTARY},
    "EXAONE 4 without a window": {
        "model_type": "exaone4",
        "sliding_window": None,
        "layer_types": ["full_attention"] * 2,
        **_WITH_ROTARY,
    },
    "Falcon": {
        "model_type": "falcon",
        "multi_query": True,
        "new_decoder_architecture": False,
        "alibi": False,
        **_WITHOUT,
    },
    "GPT-2": {"model_type": "gpt2", **_GPT2_NAMES},
    "GPT-J": {
        "model_type": "gptj",
        "rotary_dim": 16,
        "tie_word_embeddings": False,
        **_GPT2_NAMES,
    },
    "GPT-BigCode": {"model_type": "gpt_bigcode", "multi_query": True, **_GPT2_NAMES},
    "OPT": {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 128, **_WITHOUT},
    "GPT-NeoX": {"model_type": "gpt_neox", "intermediate_size": 96, **_WITHOUT},
    "Mixtral": {"model_type": "mixtral", "sliding_window": None, **_EXPERTS, **_WITH_ROTARY},
    "Qwen 2 MoE": {
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 64,
        **_EXPERTS,
        **_WITH_ROTARY,
    },
    "Qwen 3 MoE": {"model_type": "qwen3_moe", "head_dim": 32, **_EXPERTS, **_WITH_ROTARY},
    "OLMoE": {"model_type": "olmoe", **_EXPERTS, **_WITH_ROTARY},
    "Granite MoE": {"model_type": "granitemoe", **_EXPERTS, **_WITH_ROTARY},
    "GLM 4 MoE": {
        "model_type": "glm4_moe",
        "head_dim": 32,
        "n_group": 1,
        "topk_group": 1,
        **_SHARED_EXPERT,
        **_WITH_ROTARY,
    },
}
"""Values of a Transformers configuration, by family."""

WITHOUT_A_CHECKPOINT: dict[str, dict[str, Any]] = {
    "DeepSeek": {
        "architectures": ["DeepseekForCausalLM"],
        "model_type": "deepseek",
        "hidden_act": "silu",
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "rope_parameters": _DEFAULT_ROPE,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        **_SHARED_EXPERT,
        **_WITH_ROTARY,
    },
    "InternLM 2": {
        "architectures": ["InternLM2ForCausalLM"],
        "model_type": "internlm2",
        "hidden_act": "silu",
        "bias": False,
        "rope_parameters": _DEFAULT_ROPE,
        "tie_word_embeddings": False,
        **_WITH_ROTARY,
    },
    "Llama 4 without chunks": {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "head_dim": 32,
        "intermediate_size_mlp": 64,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "moe_layers": [1],
        "no_rope_layers": [1, 0],
        "attention_chunk_size": None,
        "pad_token_id": 0,
        **_WITH_ROTARY,
    },
}
"""Families whose weights Transformers cannot make: vLLM's class gets random ones."""

UNKNOWN_TO_TRANSFORMERS = ("deepseek", "internlm2")
"""Values of `model_type` whose configuration comes with the model."""

VARIANTS: dict[str, dict[str, Any]] = {
    "yarn": {
        **SUPPORTED["Qwen 2"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "linear positions": {
        **SUPPORTED["Llama"],
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "llama3": {
        **SUPPORTED["Llama"],
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "longrope": {
        **SUPPORTED["Phi 3"],
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 16,
            "long_factor": [2.0] * 16,
            "original_max_position_embeddings": 64,
        },
    },
    "tied embeddings": {**SUPPORTED["Llama"], "tie_word_embeddings": True},
    "one KV head, odd group": {
        **SUPPORTED["Llama"],
        "hidden_size": 224,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
    },
    "heads of 80": {**SUPPORTED["Llama"], "head_dim": 80},
}
"""What a checkpoint of these families can be besides; requests go past the 64 original positions
of the scaled ones."""

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
    "attention in chunks": (
        {**WITHOUT_A_CHECKPOINT["Llama 4 without chunks"], "attention_chunk_size": 32},
        "attention_chunk_size=32",
    ),
    "windows and sinks": (
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "head_dim": 16,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "sliding_window": 32,
            **_SMALL,
        },
        "sliding-window",
    ),
    "windows in every second layer": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "head_dim": 16,
            "sliding_window": 32,
            **_SMALL,
        },
        "sliding-window",
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
