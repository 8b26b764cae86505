"""Tiny models of many families: what their engines verify drafts as, and why not as trees.

The weights are random. Transformers writes the checkpoints, so vLLM's own code for the family loads
and runs them.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from vllm_trie.lab.tiny_model import model_path

Config = dict[str, Any]
"""Values of a Transformers configuration."""

VOCABULARY = 128
WINDOW = 32
"""Tokens of a sliding window or an attention chunk; prompts and outputs are longer."""
CYCLE = 8
LOGITS_SCALE = 0.05
"""Standard deviation of the head's weights: the likeliest token has no probability of 1."""


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        config: Values of its Transformers configuration.
        drafts: What Model Runner V1 verifies; ``none``: start-up refuses speculation.
        reason: A part of the message that refuses trees.
        embedding_std: Standard deviation of the embeddings of a model that repeats itself. Large
            ones make it do so, small ones leave the output to the layers; in between, drafts are
            accepted and rejected.
        engine: Options that its engines need.
        is_full: Whether all layers attend to all tokens, with positions in one dimension.
    """

    config: Config
    drafts: Literal["tree", "chain", "none"] = "tree"
    reason: str = ""
    embedding_std: float = 5.0
    engine: Config = field(default_factory=dict)
    is_full: bool = True


_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
_BASIC = {
    **_TOKENS,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
_GPT2 = {**_TOKENS, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256}
_SIZE = {**_BASIC, "intermediate_size": 64, "num_key_value_heads": 2, "pad_token_id": 0}
_THREE = {**_SIZE, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 3}
_FOUR = {**_THREE, "num_hidden_layers": 4}
_SIX = {**_THREE, "num_hidden_layers": 6}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
_SHARED_EXPERT = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
_LLAMA_4 = {
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 64,
    "head_dim": 32,
}
_ROTARY = {"rope_theta": 10000.0}
_MROPE = {**_ROTARY, "rope_type": "default", "mrope_section": [4, 6, 6]}
_VISION = {
    "depth": 1,
    "num_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 128,
}
_VISION_TOKENS = {
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "image_token_id": 5,
    "video_token_id": 6,
}
_TEXT_ONLY = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
_CAPPED = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 32,
}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


def _tree(model_type: str, size: Config = _SIZE, **values: Any) -> Family:
    return Family({"model_type": model_type, **size, **values})


def _windowed(model_type: str, size: Config, embedding_std: float = 5.0, **values: Any) -> Family:
    config = {"model_type": model_type, "sliding_window": WINDOW, **size, **values}
    return Family(config, embedding_std=embedding_std, is_full=False)


def _seeing(name: str, rope: Config, vision: Config, embedding_std: float = 5.0) -> Family:
    text = {"model_type": f"{name}_text", "rope_parameters": {**_MROPE, **rope}, **_THREE}
    config = {"model_type": name, "text_config": text, "vision_config": {**_VISION, **vision}}
    return Family({**config, **_VISION_TOKENS}, "tree", "", embedding_std, _TEXT_ONLY, False)


def _recurrent(model_type: str, size: Config = _FOUR, **values: Any) -> Family:
    return Family({"model_type": model_type, **size, **values}, "none", "state-space or recurrent")


FAMILIES: dict[str, Family] = {
    "Llama": _tree("llama"),
    "Qwen 2": _tree("qwen2"),
    "Qwen 3": _tree("qwen3", head_dim=32),
    "Mistral without a window": _tree("mistral", sliding_window=None),
    "Ministral 3": _tree("ministral3", head_dim=32, sliding_window=None),
    "Gemma": _tree("gemma", head_dim=32),
    "Phi": _tree("phi", partial_rotary_factor=0.5),
    "Phi 3": _tree("phi3"),
    "Granite": _tree("granite"),
    "OLMo 2": _tree("olmo2"),
    "GLM 4": _tree("glm4", head_dim=32),
    "Cohere": _tree("cohere", logit_scale=0.5),
    "StableLM": _tree("stablelm", partial_rotary_factor=0.5, use_qkv_bias=True),
    "SmolLM 3": _tree("smollm3", no_rope_layers=[1, 0]),
    "StarCoder 2": _tree("starcoder2", sliding_window=None),
    "Nemotron": _tree("nemotron", head_dim=32),
    "ERNIE 4.5": _tree("ernie4_5", head_dim=32),
    "EXAONE 4 without a window": _tree(
        "exaone4", sliding_window=None, layer_types=["full_attention"] * 2
    ),
    "Falcon": _tree(
        "falcon", _BASIC, multi_query=True, new_decoder_architecture=False, alibi=False
    ),
    "GPT-2": _tree("gpt2", _GPT2),
    "GPT-J": _tree("gptj", _GPT2, rotary_dim=16, tie_word_embeddings=False),
    "GPT-BigCode": _tree("gpt_bigcode", _GPT2, multi_query=True),
    "OPT": _tree("opt", _BASIC, ffn_dim=96, word_embed_proj_dim=128),
    "GPT-NeoX": _tree("gpt_neox", _BASIC, intermediate_size=96),
    "Mixtral": _tree("mixtral", sliding_window=None, **_EXPERTS),
    "Qwen 2 MoE": _tree("qwen2_moe", shared_expert_intermediate_size=64, **_EXPERTS),
    "Qwen 3 MoE": _tree("qwen3_moe", head_dim=32, **_EXPERTS),
    "OLMoE": _tree("olmoe", **_EXPERTS),
    "Granite MoE": _tree("granitemoe", **_EXPERTS),
    "GLM 4 MoE": _tree("glm4_moe", head_dim=32, n_group=1, topk_group=1, **_SHARED_EXPERT),
    "Mistral": _windowed("mistral", _THREE),
    "Gemma 2": _windowed("gemma2", _FOUR, 0.04, **_CAPPED),
    "Gemma 3": _windowed("gemma3_text", _SIX, 0.02),
    "Gemma 4": _windowed(
        "gemma4_text",
        _SIX,
        0.06,
        global_head_dim=32,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
    ),
    "gpt-oss": _windowed("gpt_oss", _FOUR, num_local_experts=4, num_experts_per_tok=2),
    "Llama 4": Family(
        {
            **_FOUR,
            **_LLAMA_4,
            "model_type": "llama4_text",
            "interleave_moe_layer_step": 2,
            "moe_layers": [1, 3],
            "no_rope_layers": [1, 1, 1, 0],
            "attention_chunk_size": WINDOW,
        },
        is_full=False,
    ),
    "Qwen 2.5 VL": _seeing("qwen2_5_vl", {}, {"patch_size": 14, "fullatt_block_indexes": [0]}),
    "Qwen 3 VL": _seeing(
        "qwen3_vl",
        {"mrope_interleaved": True},
        {"patch_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
        embedding_std=4.0,
    ),
    # Plain vLLM's latent attention on CPUs depends on the other requests of the batch, in float32
    # too, and differs from Transformers' at the first token: no output to compare with.
    "DeepSeek V2": Family(
        {
            **_SIZE,
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
        },
        "chain",
        "MLA",
    ),
    # No drafts can be verified. vLLM's own `ngram` damages recurrent state on CPUs or ends the
    # engine: the convolution's state does not return to the last accepted token,
    # `mamba_cache_mode="align"` needs Triton, and a step without drafts after one with accepted
    # ones reads an old state (vllm-project/vllm#39273, #52942). Jamba, Mamba and Falcon Mamba do
    # not run on CPUs at all, where `selective_scan_fwd` is missing.
    "Qwen 3 Next": _recurrent(
        "qwen3_next",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        **_DELTA_NET,
    ),
    "Qwen 3.5": _recurrent("qwen3_5_text", **_DELTA_NET),
    "Falcon H1": _recurrent(
        "falcon_h1",
        _THREE,
        mamba_d_ssm=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_chunk_size=16,
    ),
    "Nemotron H": _recurrent(
        "nemotron_h",
        layers_block_type=["mamba", "attention", "mamba", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=1,
        ssm_state_size=16,
    ),
    "Zamba 2": _recurrent(
        "zamba2",
        layers_block_type=["mamba", "mamba", "hybrid", "mamba"],
        num_mem_blocks=1,
        n_mamba_heads=8,
        mamba_headdim=32,
        mamba_ngroups=1,
        mamba_d_state=16,
        attention_head_dim=64,
        attention_hidden_size=256,
    ),
    "LFM 2": _recurrent(
        "lfm2",
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        conv_dim=128,
        conv_dim_out=128,
    ),
    "Mamba": _recurrent(
        "mamba", _BASIC, state_size=8, conv_kernel=4, time_step_rank=4, layer_norm_epsilon=1e-5
    ),
    "Mamba 2": _recurrent("mamba2", _THREE, num_heads=8, state_size=16, n_groups=1),
    "Whisper": Family(
        {
            **_TOKENS,
            "model_type": "whisper",
            "architectures": ["WhisperForConditionalGeneration"],
            "d_model": 64,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "max_target_positions": 256,
            "max_source_positions": 256,
        },
        "none",
        "encoder-decoder",
    ),
    "BERT": Family(
        {"model_type": "bert", "architectures": ["BertModel"], **_SIZE}, "none", "does not generate"
    ),
}
if torch.cpu._is_avx512_supported():  # as vLLM's kernels for these types demand
    FAMILIES["fp8 KV cache"] = Family(
        {"model_type": "qwen2", **_THREE},
        "chain",
        "kv_cache_dtype='fp8'",
        engine={"kv_cache_dtype": "fp8"},
    )

TREES = [name for name, family in FAMILIES.items() if family.drafts == "tree" and family.is_full]
PARTIAL_TREES = [
    name for name, family in FAMILIES.items() if family.drafts == "tree" and not family.is_full
]
CHAINS = [name for name, family in FAMILIES.items() if family.drafts == "chain"]
RECURRENT = [name for name, family in FAMILIES.items() if "recurrent" in family.reason]

_SCALED = {**_ROTARY, "factor": 4.0}
_ORIGINAL = {"original_max_position_embeddings": 64}
VARIANTS: dict[str, Family] = {
    "yarn": _tree("qwen2", rope_parameters={"rope_type": "yarn", **_ORIGINAL, **_SCALED}),
    "linear positions": _tree(
        "llama", max_position_embeddings=64, rope_parameters={"rope_type": "linear", **_SCALED}
    ),
    "llama3": _tree(
        "llama",
        rope_parameters={
            "rope_type": "llama3",
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            **_ORIGINAL,
            **_SCALED,
        },
    ),
    "longrope": _tree(
        "phi3",
        rope_parameters={
            "rope_type": "longrope",
            "short_factor": [1.0] * 16,
            "long_factor": [2.0] * 16,
            **_ORIGINAL,
            **_ROTARY,
        },
        **_ORIGINAL,
    ),
    "tied embeddings": _tree("llama", tie_word_embeddings=True),
    "one KV head, odd group": _tree(
        "llama", hidden_size=224, num_attention_heads=7, num_key_value_heads=1
    ),
    "heads of 80": _tree("llama", head_dim=80),
    "Qwen 2 of three layers": _tree("qwen2", _THREE),
    "Phi 3 of three layers": _tree("phi3", _THREE),
}
"""What a checkpoint of these families can be besides; requests go past the 64 original positions
of the scaled ones."""


def write_model(folder: Path, family: Family, repeats: bool = False) -> str:
    """Write a family's checkpoint with random weights.

    Args:
        folder: What is made.
        family: Its configuration.
        repeats: Whether the output is to repeat itself in parts. The head's rows are the embeddings
            moved on by one token within cycles of `CYCLE` tokens, so that a model without layers
            would repeat the cycle of the last token forever. Tied embeddings repeat the last token
            instead. Otherwise each token depends on those before it: the embeddings are small, so
            that the layers decide the output.

    Returns:
        The folder.
    """
    torch.manual_seed(0)
    layers_std, embedding_std = (0.2, family.embedding_std) if repeats else (0.25, 0.04)
    model_class = _model_class(family.config)
    config = AutoConfig.for_model(**family.config)
    model = model_class.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if weight.dim() >= 2 and "visual" not in name:
            embeds = "embed" in name or "wte" in name
            torch.nn.init.normal_(weight, std=embedding_std if embeds else layers_std)
        if name.endswith("sinks"):
            torch.nn.init.constant_(weight, 8.0)  # near the largest scores
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if repeats and head.weight is not embeddings.weight:
        order = torch.arange(VOCABULARY).view(-1, CYCLE).roll(1, dims=1).flatten()
        head.weight.data.copy_(LOGITS_SCALE / embedding_std * embeddings.weight.data[order])
    model.save_pretrained(folder)
    return str(folder)


def write_config(folder: Path, config: Config) -> str:
    """Write a model folder that holds a configuration and nothing else; return its path."""
    if "architectures" not in config:
        config_class = type(AutoConfig.for_model(**config))
        named = _model_class(config)._model_mapping[config_class].__name__
        config = {**config, "architectures": [named]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def with_own_tokenizer(folder: Path) -> str:
    """Write the shipped model with a tokenizer whose class comes with it; return its path."""
    shutil.copytree(model_path(), folder)
    (folder / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    settings = folder / "tokenizer_config.json"
    classes = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | classes))
    return str(folder)


def repeated_phrases(count: int) -> list[dict[str, list[int]]]:
    """Return prompts of 20, 47, 74 ... tokens, each of which repeats a phrase of its own."""
    rng = np.random.default_rng(0)
    phrases = [rng.integers(CYCLE, VOCABULARY, 9 + i).tolist() for i in range(count)]
    return [{"prompt_token_ids": (p * 12)[: 20 + 27 * i]} for i, p in enumerate(phrases)]


def _model_class(config: Config) -> Any:
    return AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM


def positions_with_image(
    model: Any, input_tokens: Sequence[int], mm_features: Any
) -> tuple[torch.Tensor, int]:
    """Positions in time, height and width as if the first 16 tokens were an image of 4 by 4.

    Fewer tokens are text: a beam's slot on Model Runner V2 begins with one.
    """
    if len(input_tokens) < 16:
        return torch.arange(len(input_tokens)).expand(3, -1), 0
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
