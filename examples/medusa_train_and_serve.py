"""Medusa heads from scratch: train them on a little text, then serve them.

    python examples/medusa_train_and_serve.py [--model PATH] [--data FILE_OR_FOLDER] [--steps N]
        [further options of vllm serve]

The model stays frozen; only the heads learn. After a few steps they make first guesses. A real run
takes thousands of steps, on text that the model itself has written (see docs/drafters.md).
"""

from __future__ import annotations

import argparse
import inspect
import json
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import httpx
from serve_openai_client import serve  # in this folder

from vllm_trie.lab.tiny_model import model_path

REQUEST = f"{inspect.getsource(textwrap.indent)}\nrepeat the code"


def train(model: str, data: Path, heads: Path, steps: int) -> None:
    command = [str(Path(sys.executable).with_name("vllm-trie")), "medusa", "train"]
    command += ["--model", model, "--data", str(data), "--out", str(heads)]
    command += ["--steps", str(steps), "--batch", "4", "--context", "128", "--lr", "3e-3"]
    print("$ vllm-trie", *command[1:], flush=True)
    subprocess.run(command, check=True)


def main(model: str, data: Path | None, steps: int, further: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        heads = Path(folder) / "heads"
        if data is None:
            data = Path(folder) / "text.txt"
            shutil.copy(inspect.getfile(textwrap), data)
        train(model, data, heads, steps)
        held_out = json.loads((heads / "training.json").read_text())["held_out"]
        for number, head in enumerate(held_out, 1):
            print(f"head {number}: {head['top5']:.0%} of the tokens among its first five guesses")

        options = ["--spec-method", "medusa_dynamic", "--spec-model", str(heads)]
        # "product" drafts only what the heads predict. The default, "context", also uses the text
        # so far, which would hide how little these heads have learned. "fixed" verifies every node.
        choice = {"vllm_trie": {"joint": "product", "node_budget": "fixed"}}
        options += ["--spec-tokens", "16", "--additional-config", json.dumps(choice)]
        options += ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
        options += ["--kv-cache-memory-bytes", str(1 << 30)]
        with serve(model, *options, *further) as client:
            chat = {
                "model": client.models.list().data[0].id,
                "messages": [{"role": "user", "content": REQUEST}],
                "temperature": 0,
                "max_tokens": 96,
            }
            reply, plain = (
                client.chat.completions.create(**chat, extra_body={"vllm_xargs": extra})
                for extra in ({}, {"speculation": False})
            )
            metrics = httpx.get(str(client.base_url.join("/metrics")), trust_env=False).text
        accepted = sum(
            float(line.split()[-1])
            for line in metrics.splitlines()
            if line.startswith("vllm:trie_accepted_tokens_total")
        )
        text = reply.choices[0].message.content
        print(f"\n{text}\n")
        tokens = reply.usage.completion_tokens
        print(f"{accepted:.0f} of {tokens} tokens came from the heads")
        print(
            "same as without drafts:",
            "yes" if text == plain.choices[0].message.content else "no",
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(model_path()), help="any model that vLLM serves")
    parser.add_argument("--data", type=Path, help="text to learn from; default: a Python module")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    arguments, rest = parser.parse_known_args()
    main(arguments.model, arguments.data, arguments.steps, rest)
