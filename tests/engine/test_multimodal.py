"""Prompts with images: their placeholders have embeddings and no token, and drafts follow them.

The models have a tiny vision tower, a tiny decoder and random weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    BlipImageProcessor,
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PaddleOCRVLProcessor,
)
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams

from tests.engine.beam.cases import SCORE_TOLERANCE
from tests.engine.beam.oracle import Expected, hypotheses_of
from tests.engine.compare import accepted_tokens, differences, generate, speculation, tell_oracle
from vllm_trie.lab.local_engine import scheduler_of
from vllm_trie.lab.tiny_model import model_path

IMAGE, SIZE, NUM_QUERIES = "<image>", 56, 8
NUM_TOKENS, NUM_SEARCHED, WIDTH = 44, 12, 4
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
QUESTION = "what is this? " * 8
"""Longer than a KV block."""
LITTLE_ROOM = {
    "max_num_batched_tokens": 16,
    "enable_chunked_prefill": True,
    "num_gpu_blocks_override": 12,
}
"""Prompts are computed in chunks, and what runs is preempted."""

pytestmark = pytest.mark.usefixtures("test_drafters", "inspect_models_here")


def save(network: Any, processor: Any, folder: Path) -> None:
    for name, weight in network.named_parameters():
        if weight.dim() >= 2:
            torch.nn.init.normal_(weight, std=0.04 if "embed_tokens" in name else 0.25)
    network.save_pretrained(folder)
    processor.save_pretrained(folder)


def write_blip2(folder: Path) -> None:
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
    images = BlipImageProcessor(size={"height": SIZE, "width": SIZE})
    processor = Blip2Processor(images, tokenizer, num_query_tokens=NUM_QUERIES)
    save(Blip2ForConditionalGeneration(config), processor, folder)


def write_paddle_ocr(folder: Path) -> None:
    special = {"image_token": IMAGE}
    tokenizer = AutoTokenizer.from_pretrained(str(model_path()), extra_special_tokens=special)
    config = PaddleOCRVLConfig(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": SIZE,
            "patch_size": 14,
        },
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 256,
            "eos_token_id": 0,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 6, 6],
            },
        },
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
    )
    images = PaddleOCRVLImageProcessorPil(min_pixels=SIZE * SIZE, max_pixels=4 * SIZE * SIZE)
    processor = PaddleOCRVLProcessor(images, tokenizer)
    save(PaddleOCRVLForConditionalGeneration(config), processor, folder)


class Family(NamedTuple):
    """A model, what stands for an image in a prompt, and the most images of a prompt."""

    write: Callable[[Path], None]
    mark: str
    most_images: int


FAMILIES = {
    "positions in one dimension": Family(write_blip2, "", 1),
    "positions in three dimensions": Family(write_paddle_ocr, f"{IMAGE}, ", 5),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> tuple[str, Family]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    FAMILIES[request.param].write(folder)
    return str(folder), FAMILIES[request.param]


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def prompts(family: Family) -> list[dict[str, Any]]:
    """Some with images and some without; those of a kind differ in the image only.

    The images of the last one do not fit the encoder's cache together.
    """

    def with_images(count: int, seed: int) -> dict[str, Any]:
        images = [picture(seed + i) for i in range(count)]
        data = images if count > 1 else images[0]
        return {"prompt": family.mark * count + QUESTION, "multi_modal_data": {"image": data}}

    few = [with_images(1, seed) for seed in range(4)]
    return [
        *few,
        {"prompt": "def main():"},
        {"prompt": "import"},
        with_images(family.most_images, 9),
    ]


def searched_by_transformers(model: str, prompt: dict[str, Any]) -> list[Expected]:
    network = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    stock = network._expand_inputs_for_generation

    def repeated(**options: Any) -> Any:
        """Let each beam have the image; Transformers repeats the rows of PaddleOCR-VL's patches."""
        input_ids, result = stock(**options)
        for name in {"pixel_values", "image_grid_thw"} & result.keys():
            result[name] = torch.cat([options[name]] * options["expand_size"])
        return input_ids, result

    network._expand_inputs_for_generation = repeated
    images, text = prompt["multi_modal_data"]["image"], prompt["prompt"]
    inputs = AutoProcessor.from_pretrained(model)(images=images, text=text, return_tensors="pt")
    return hypotheses_of(network, num_beams=WIDTH, max_new_tokens=NUM_SEARCHED, **inputs)


def check(results: Sequence[Any], expected: Sequence[Sequence[Expected]]) -> None:
    for result, hypotheses in zip(results, expected, strict=True):
        outputs = result.outputs
        assert [list(output.token_ids) for output in outputs] == [h.token_ids for h in hypotheses]
        for output, hypothesis in zip(outputs, hypotheses, strict=True):
            assert abs(output.score - hypothesis.score) < SCORE_TOLERANCE


@pytest.mark.parametrize("options", [{}, LITTLE_ROOM], ids=["at once", "in little room"])
def test_images(engine, family, options):
    model, kind = family
    llm = engine(
        model=model,
        max_model_len=256,
        block_size=32,
        limit_mm_per_prompt={"image": kind.most_images},
        kv_cache_memory_bytes=16 << 20,
        **speculation("test_oracle", 16),
        **options,
    )
    plain = SamplingParams(**GREEDY, extra_args={"speculation": False})
    expected = generate(llm, prompts(kind), plain)
    tokens = [tuple(output.outputs[0].token_ids) for output in expected]
    assert len(set(tokens)) == len(tokens), "the output must follow the image"
    before = accepted_tokens(llm)
    # Prompts that differ in the image only have the same tokens: the oracle learns one at a time.
    for prompt, output in zip(prompts(kind), expected, strict=True):
        tell_oracle([output])
        assert differences([output], generate(llm, [prompt], SamplingParams(**GREEDY))) == []
    outputs = generate(llm, prompts(kind), SamplingParams(**GREEDY))
    assert differences(expected, outputs) == []
    assert accepted_tokens(llm) - before > 0.2 * len(expected) * NUM_TOKENS

    # Searches next to the same requests. The first run computes all prompts, the second none.
    images = [prompt for prompt in prompts(kind) if "multi_modal_data" in prompt]
    hypotheses = [searched_by_transformers(model, prompt) for prompt in images]
    beams = {"n": WIDTH, "temperature": 0.0, "max_tokens": NUM_SEARCHED}
    search = SamplingParams(**beams, extra_args={"beam_width": WIDTH})
    params = [search] * len(images) + [plain] * len(expected)
    preempted = scheduler_of(llm).beam_counters.beams_preempted
    llm.reset_prefix_cache()
    check(generate(llm, images[-1:], search), hypotheses[-1:])  # frees images for the next ones
    llm.reset_prefix_cache()
    for _ in range(2):
        results = llm.generate([*images, *prompts(kind)], params, use_tqdm=False)
        check(results[: len(images)], hypotheses)
        assert differences(expected, results[len(images) :]) == []
    cached = [result.num_cached_tokens for result in results[: len(images)]]
    assert any(cached) if options else all(cached)
    assert (scheduler_of(llm).beam_counters.beams_preempted > preempted) == bool(options)
    groups = scheduler_of(llm).beam_counters.groups
    stock = BeamSearchParams(beam_width=WIDTH, max_tokens=NUM_SEARCHED)
    for result, best in zip(llm.beam_search(images, stock), hypotheses, strict=True):
        texts = [sequence.tokens[-NUM_SEARCHED:] for sequence in result.sequences]
        assert texts == [hypothesis.token_ids for hypothesis in best]
    assert scheduler_of(llm).beam_counters.groups == groups + len(images)
