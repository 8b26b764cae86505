"""Prompts with images: their placeholders have embeddings and no token, and drafts follow them.

The model is BLIP-2 with a tiny vision tower and decoder and random weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    BlipImageProcessor,
)
from vllm import SamplingParams

from tests.engine.compare import accepted_tokens, differences, speculation, tell_oracle
from vllm_trie.lab.tiny_model import model_path

IMAGE, SIZE, NUM_QUERIES = "<image>", 28, 8
NUM_TOKENS = 60
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}

pytestmark = pytest.mark.usefixtures("test_drafters", "inspect_models_here")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blip2")
    tokenizer = AutoTokenizer.from_pretrained(str(model_path()))
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    tower = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = Blip2Config(
        vision_config={**tower, "image_size": SIZE, "patch_size": 14},
        qformer_config={**tower, "encoder_hidden_size": 64, "vocab_size": 8},
        text_config={
            "model_type": "opt",
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "word_embed_proj_dim": 128,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "eos_token_id": 0,
        },
        num_query_tokens=NUM_QUERIES,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
    )
    torch.manual_seed(0)
    network = Blip2ForConditionalGeneration(config)
    for name, weight in network.named_parameters():
        if weight.dim() >= 2:
            torch.nn.init.normal_(weight, std=0.04 if "embed_tokens" in name else 0.25)
    network.save_pretrained(folder)
    images = BlipImageProcessor(size={"height": SIZE, "width": SIZE})
    processor = Blip2Processor(images, tokenizer, num_query_tokens=NUM_QUERIES)
    processor.save_pretrained(folder)
    return str(folder)


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def prompts() -> list[dict[str, Any]]:
    """Some with an image and some without; those of a kind differ in the image only."""
    with_images = [
        {"prompt": "what is this?", "multi_modal_data": {"image": picture(i)}} for i in range(5)
    ]
    return [*with_images, {"prompt": "def main():"}, {"prompt": "import"}]


@pytest.mark.parametrize("chunked", [False, True])
def test_images(engine, model, chunked):
    options = {"max_num_batched_tokens": 16, "enable_chunked_prefill": True} if chunked else {}
    llm = engine(
        model=model,
        max_model_len=256,
        limit_mm_per_prompt={"image": 1},
        kv_cache_memory_bytes=16 << 20,
        **speculation("test_oracle", 16),
        **options,
    )
    plain = SamplingParams(**GREEDY, extra_args={"speculation": False})
    expected = llm.generate(prompts(), plain, use_tqdm=False)
    tokens = [tuple(output.outputs[0].token_ids) for output in expected]
    assert len(set(tokens)) == len(tokens), "the output must follow the image"
    before = accepted_tokens(llm)
    # Prompts that differ in the image only have the same tokens: the oracle learns one at a time.
    for prompt, output in zip(prompts(), expected, strict=True):
        tell_oracle([output])
        outputs = llm.generate([prompt], SamplingParams(**GREEDY), use_tqdm=False)
        assert differences([output], outputs) == []
    outputs = llm.generate(prompts(), SamplingParams(**GREEDY), use_tqdm=False)
    assert differences(expected, outputs) == []
    assert accepted_tokens(llm) - before > 0.2 * len(expected) * NUM_TOKENS
