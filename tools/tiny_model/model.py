"""A small Llama written for training on a CPU; its weights are Hugging Face's, name for name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_QUERY_CHUNK = 256
"""Queries per attention call: their scores stay in the cache, and later keys are not computed."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model. Heads of 64 with shared keys are what vLLM's CPU attention takes."""

    vocab_size: int = 2048
    hidden_size: int = 256
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    intermediate_size: int = 512
    rope_theta: float = 500_000.0
    max_position: int = 2048
    norm_eps: float = 1e-6


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        scale = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * scale * self.weight).to(x.dtype)


class Linear(nn.Module):
    """A matrix kept in float32 and used in the activations' dtype."""

    def __init__(self, in_size: int, out_size: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_size, in_size) * std)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def causal_attention(query: Tensor, key: Tensor, value: Tensor, start: int = 0) -> Tensor:
    """Causal attention of queries at positions ``start...`` over keys at ``0...``.

    Args:
        query: ``[batch, heads, queries, head_size]``.
        key, value: ``[batch, heads, start + queries, head_size]``.

    Returns:
        ``[batch, heads, queries, head_size]``.
    """
    query = query * query.shape[-1] ** -0.5
    count, outputs = query.shape[2], []
    for begin in range(0, count, _QUERY_CHUNK):
        end = min(begin + _QUERY_CHUNK, count)
        visible = start + end
        scores = (query[:, :, begin:end] @ key[:, :, :visible].transpose(-1, -2)).float()
        positions = torch.arange(start + begin, visible)[:, None]
        scores = scores.masked_fill(torch.arange(visible)[None] > positions, -1e30)
        outputs.append(scores.softmax(-1).to(value.dtype) @ value[:, :, :visible])
    return torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x [..., tokens, head_size]``; cos, sin: ``[tokens, head_size / 2]``."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


KeyValue = tuple[Tensor, Tensor]


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, std: float) -> None:
        super().__init__()
        size = config.head_size
        self.config = config
        self.q_proj = Linear(config.hidden_size, config.num_heads * size, std)
        self.k_proj = Linear(config.hidden_size, config.num_kv_heads * size, std)
        self.v_proj = Linear(config.hidden_size, config.num_kv_heads * size, std)
        self.o_proj = Linear(config.num_heads * size, config.hidden_size, 0.0)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: KeyValue | None = None
    ) -> tuple[Tensor, KeyValue]:
        batch, tokens, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, tokens, -1, self.config.head_size).transpose(1, 2)

        query = rotate(heads(self.q_proj(x)), cos, sin)
        key = rotate(heads(self.k_proj(x)), cos, sin)
        value = heads(self.v_proj(x))
        start = 0
        if past is not None:
            start = past[0].shape[2]
            key, value = torch.cat((past[0], key), 2), torch.cat((past[1], value), 2)
        repeats = self.config.num_heads // self.config.num_kv_heads
        y = causal_attention(
            query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), start
        )
        return self.o_proj(y.transpose(1, 2).reshape(batch, tokens, -1)), (key, value)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, std: float) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, std)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, std)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        std = 0.6 * config.hidden_size**-0.5
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, std)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config, std)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: KeyValue | None = None
    ) -> tuple[Tensor, KeyValue]:
        y, present = self.self_attn(self.input_layernorm(x), cos, sin, past)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), present


class TinyLlama(nn.Module):
    """``LlamaForCausalLM`` with tied embeddings, float32 weights, activations in any dtype."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size) * 0.02)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def rotary(self, tokens: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[tokens, head_size / 2]`` of positions ``start...``, float32."""
        size = self.config.head_size
        frequencies = self.config.rope_theta ** (-torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(start, start + tokens).float(), frequencies)
        return angles.cos(), angles.sin()

    def hidden(
        self, ids: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Final hidden states ``[batch, tokens, hidden_size]`` in ``dtype``."""
        x = F.embedding(ids, self.embed_tokens).to(dtype)
        for layer in self.layers:
            x, _ = layer(x, cos, sin)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.to(hidden.dtype)).float()

    def forward(
        self,
        ids: Tensor,
        targets: Tensor,
        weights: Tensor,
        cos: Tensor,
        sin: Tensor,
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted mean losses of the next token; arguments ``[batch, tokens]``.

        Returns:
            ``(cross entropy, mean of -log p over the vocabulary, squared log partition)``: the
            second is what label smoothing adds, the third the z-loss of PaLM.
        """
        logits = self.logits(self.hidden(ids, cos, sin, dtype)).view(-1, self.config.vocab_size)
        norm = torch.logsumexp(logits, -1)
        weights = weights.reshape(-1) / weights.sum().clamp(min=1.0)
        nll = norm - logits.gather(1, targets.reshape(-1, 1)).squeeze(1)
        uniform = norm - logits.mean(-1)
        return (nll * weights).sum(), (uniform * weights).sum(), (norm.pow(2) * weights).sum()


def save_model(model: TinyLlama, folder: Path, eos_token_id: int = 0) -> None:
    """Write ``config.json``, ``generation_config.json`` and bfloat16 ``model.safetensors``."""
    save_config(model.config, folder, eos_token_id)
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    tensors["model.embed_tokens.weight"] = tensors.pop("model.embed_tokens")
    save_file(
        {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()},
        str(folder / "model.safetensors"),
        metadata={"format": "pt"},
    )
    (folder / "model.safetensors").chmod(0o644)
    generation = {"eos_token_id": eos_token_id, "pad_token_id": eos_token_id, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def save_config(config: ModelConfig, folder: Path, eos_token_id: int = 0) -> None:
    """Write ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": eos_token_id,
        "dtype": "bfloat16",
        "use_cache": True,
    }
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")


def load_model(folder: Path) -> TinyLlama:
    """Read a Llama with tied embeddings, such as :func:`save_model` writes; weights become
    float32."""
    read = json.loads((folder / "config.json").read_text())
    config = ModelConfig(
        vocab_size=read["vocab_size"],
        hidden_size=read["hidden_size"],
        num_layers=read["num_hidden_layers"],
        num_heads=read["num_attention_heads"],
        num_kv_heads=read["num_key_value_heads"],
        head_size=read["head_dim"],
        intermediate_size=read["intermediate_size"],
        rope_theta=read["rope_parameters"]["rope_theta"],
        max_position=read["max_position_embeddings"],
        norm_eps=read["rms_norm_eps"],
    )
    model = TinyLlama(config)
    tensors = {
        name.removeprefix("model."): value.float()
        for name, value in load_file(str(folder / "model.safetensors")).items()
    }
    tensors["embed_tokens"] = tensors.pop("embed_tokens.weight")
    model.load_state_dict(tensors)
    return model
