"""What engines answer and count, as one file, to compare two commits byte by byte.

    python -m tests.engine.record OUT.json          # Model Runner V1, some minutes
    python -m tests.engine.record --v2 OUT.json     # V2, in Triton's interpreter
    python -m tests.engine.record --compare A.json B.json

Requests of all kinds meet in an engine of each kind (:mod:`tests.engine.scenarios`), with the
shipped model in float32. Two records of one commit are equal. They lack times, and what times
decide: gauges of a logging interval, the adaptive node budget, and drafts that give way to streams.
Three things that times or chance would decide are fixed: grammars compile at once, forced tokens
have no deadline, and request ids and keys come from a seed.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock


def record(is_v2: bool) -> dict[str, Any]:
    """Run all scenarios; return what each has answered and counted. Imports vLLM."""
    if is_v2:
        from tests.engine import v2_on_cpu  # first: it prepares for vLLM

        v2_on_cpu.schedule_as_on_a_gpu()
        v2_on_cpu.use_v2(True)
    from vllm.plugins import load_general_plugins
    from vllm.v1.engine import input_processor

    from tests.engine import scenarios
    from vllm_trie.extras.forced_tokens import forced_tokens

    load_general_plugins()  # searches have sampling parameters that vLLM alone refuses
    ids = map("{:08x}".format, itertools.count())
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch("os.urandom", random.Random(0).randbytes),
        mock.patch.object(input_processor, "random_uuid", ids.__next__),
        mock.patch.object(forced_tokens, "STEP_SECONDS", 600.0),
    ):
        folder = Path(name)
        of_runner = scenarios.on_v2(folder) if is_v2 else scenarios.on_v1(folder)
        recorded = {title: scenarios.run(*rest) for title, *rest in of_runner}
        return recorded | scenarios.files_of(folder)


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of a record, as text, with their places."""
    if not isinstance(value, dict | list):
        yield place, str(value)
        return
    for key, below in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(below, f"{place}/{key}")


def compare(left: Path, right: Path) -> int:
    """Print the values in which two records differ; return whether there are any."""
    one, other = (dict(leaves(json.loads(path.read_text()))) for path in (left, right))
    places = [place for place in one | other if one.get(place) != other.get(place)]
    for place in places[:200]:
        print(f"{place}: {one.get(place)} against {other.get(place)}"[:300])
    print(f"{len(places)} differences among {len(one | other)} values")
    return int(bool(places))


def main(arguments: list[str]) -> int:
    if arguments[0] == "--compare":
        return compare(*map(Path, arguments[1:]))
    if "PYTHONHASHSEED" not in os.environ:  # the order of sets
        command = [sys.executable, "-m", "tests.engine.record", *arguments]
        return subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "0"}).returncode
    Path(arguments[-1]).write_text(json.dumps(record("--v2" in arguments), indent=0))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
