"""`vllm serve` with draft trees, and OpenAI's client: chats, a prediction, completions, beams.

python examples/serve_openai_client.py [--model PATH] [further options of vllm serve]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from openai import DefaultHttpxClient, OpenAI, OpenAIError

from vllm_trie.lab.tiny_model import model_path

CODE = """\
def count_words(lines):
    counts = {}
    for line in lines:
        for word in line.split():
            counts[word] = counts.get(word, 0) + 1
    return counts
"""
START_LIMIT_S = 600


@contextlib.contextmanager
def serve(model: str, *options: str) -> Iterator[OpenAI]:
    """Start a server on a free port and yield a client; the server ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", model]
    command += ["--host", "127.0.0.1", "--port", str(port), *options]
    print("$ vllm", *command[1:], flush=True)
    # Otherwise vLLM pins its threads to cores, however busy these are.
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **os.environ}
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            client = OpenAI(
                base_url=f"http://127.0.0.1:{port}/v1",
                api_key="none",
                max_retries=0,
                http_client=DefaultHttpxClient(trust_env=False),  # no proxy for the local host
            )
            deadline = time.monotonic() + START_LIMIT_S
            while not _answers(client):
                if server.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    sys.exit(log.read().decode(errors="replace") + "\nthe server did not start")
                time.sleep(0.5)
            yield client
        finally:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(server.pid, signal.SIGTERM)
                server.wait(timeout=30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)


def _answers(client: OpenAI) -> bool:
    try:
        return bool(client.models.list().data)
    except OpenAIError:
        return False


def main(model: str, further: list[str]) -> None:
    options = ["--speculative-model", "ngram_trie", "--spec-tokens", "32", "--dtype", "float32"]
    options += ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(1 << 30)]
    with serve(model, *options, "--enforce-eager", *further) as client:
        name = client.models.list().data[0].id

        messages = [{"role": "user", "content": f"{CODE}\nrepeat the code"}]
        chat = {"model": name, "messages": messages, "temperature": 0, "max_tokens": 80}
        reply = client.chat.completions.create(**chat)
        print(f"\n=== chat\n{reply.choices[0].message.content}")

        print("\n=== the same, streamed, and without drafts")
        text = ""
        for chunk in client.chat.completions.create(
            **chat, stream=True, extra_body={"vllm_xargs": {"speculation": False}}
        ):
            text += chunk.choices[0].delta.content or ""
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print(f"\nequal: {'yes' if text == reply.choices[0].message.content else 'no'}")

        prediction = {"type": "content", "content": CODE}
        reply = client.chat.completions.create(**chat, prediction=prediction)
        counts = reply.usage.completion_tokens_details
        print("\n=== chat with a prediction")
        print(f"accepted tokens of it: {counts.accepted_prediction_tokens}")

        reply = client.completions.create(
            model=name, prompt="def main():", temperature=0, max_tokens=32, stop=["\n\n"]
        )
        print(f"\n=== completion\ndef main():{reply.choices[0].text}")

        print("\n=== beam search")
        reply = client.completions.create(
            model=name, prompt="def main():", temperature=0, max_tokens=16, n=3,
            extra_body={"use_beam_search": True},
        )  # fmt: skip
        for rank, choice in enumerate(reply.choices, 1):
            print(f"  {rank}. {choice.text!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(model_path()), help="any model that vLLM serves")
    arguments, rest = parser.parse_known_args()
    main(arguments.model, rest)
