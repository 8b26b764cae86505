"""Convert a GGUF file: `python -m vllm_trie.lab.smollm2.convert FILE FOLDER`.

Needs the packages `gguf` and `accelerate`, which :mod:`vllm_trie.lab.smollm2.download` provides.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path


def convert(source: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file as a Hugging Face folder, in bfloat16."""
    import gguf  # type: ignore[import-not-found]
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Transformers reads the file three times, and maps names anew for each module.
    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, name, functools.cache(getattr(gguf, name)))
    parent, gguf_file = str(source.parent), source.name
    model = AutoModelForCausalLM.from_pretrained(
        parent,
        gguf_file=gguf_file,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(parent, gguf_file=gguf_file)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
