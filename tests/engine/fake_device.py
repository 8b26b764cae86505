"""Steps of Model Runner V2's adapter and of beams on a device that is not there.

Tensors are fake: they have a device, and no values. The device is one of another make than CPUs and
GPUs, which torch lets Python register; the host's arrays are real. Kernels are not run. Noted are
reads of a device's values, copies that are not queued, and operands, indices and kernels' arguments
on the wrong side. A program of its own, as a process has one such device. Prints one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

from tests.engine import v2_on_cpu  # first: it prepares for vLLM

# isort: split

import numpy as np
import torch
import triton
import triton.language
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from vllm import SamplingParams
from vllm.v1.core.sched.output import NewRequestData

from tests.unit.drafters.support import VOCAB, make_context
from vllm_trie.drafters import Drafter, DrafterOptions
from vllm_trie.tree import TokenTree
from vllm_trie.vllm_hooks.beam_wire import BeamStep, TokenSelection
from vllm_trie.vllm_hooks.worker.beam.device_beams import DeviceBeams
from vllm_trie.vllm_hooks.worker.drafting.guard import GuardedDrafter
from vllm_trie.vllm_hooks.worker.runners import v2_adapter
from vllm_trie.vllm_hooks.worker.runners.v2_trees import V2TreeAdapter
from vllm_trie.vllm_hooks.worker.verification.compaction import CacheGroup
from vllm_trie.vllm_hooks.worker.verification.tree_walk import walk_trees
from vllm_trie.vllm_hooks.worker.verifier import TreeVerifier

aten = torch.ops.aten
PLACES = 4
"""Draft tokens of each request."""


class Watch(TorchDispatchMode):
    """Notes what a device would wait for or refuse, with its place.

    Attributes:
        faults: So far, each once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []

    def note(self, fault: str) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame and not re.search("/vllm_trie/|/vllm/", frame.f_code.co_filename):
            frame = frame.f_back
        place = frame.f_code.co_qualname if frame else "the program"
        if (said := f"{fault} in {place}") not in self.faults:
            self.faults.append(said)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if torch.is_tensor(value)]
        # A device takes a number from the host.
        kinds = {tensor.device.type for tensor in tensors if tensor.ndim}
        if func is aten.copy_.default:
            is_queued = kwargs.get("non_blocking") or any(args[2:])
            if len(kinds) > 1 and not is_queued:
                self.note("a copy that is not queued")
        elif func is aten._to_copy.default:
            target = kwargs.get("device") or tensors[0].device
            if target.type != tensors[0].device.type and not kwargs.get("non_blocking"):
                self.note("a copy that is not queued")
        elif len(kinds) > 1:
            self.note(f"{func} of host and device")
        try:
            return func(*args, **kwargs)
        except Exception as error:
            self.note(type(error).__name__)
            raise


@contextlib.contextmanager
def fake_device() -> Iterator[tuple[Watch, torch.device]]:
    """Let tensors be fake, kernels do nothing, and copies to the host give what :func:`on` put on
    the device, or zeros."""
    watch = Watch()

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if any(t.device.type == "cpu" for t in (*args, *kwargs.values()) if torch.is_tensor(t)):
            watch.note("a kernel with an argument on the host")

    def to_host(tensor: torch.Tensor) -> np.ndarray:
        tensor.to("cpu", non_blocking=True)
        zeros = np.zeros(tensor.shape, dtype=str(tensor.dtype).removeprefix("torch."))
        return _values.get(id(tensor), zeros)

    InterpretedFunction.run = launch
    v2_adapter.async_copy_to_np = to_host
    torch.cuda.Event = v2_on_cpu.Event
    torch.Tensor.pin_memory = lambda self: self  # type: ignore[method-assign]
    torch.Tensor.data_ptr = lambda self: id(self)  # type: ignore[method-assign]
    with FakeTensorMode(allow_non_fake_inputs=True), watch:
        yield watch, torch.device("pretended", 0)


_values: dict[int, np.ndarray] = {}
_kept: list[torch.Tensor] = []


def on(device: torch.device, values: Any, dtype: Any = np.int64) -> torch.Tensor:
    """Return values on the device, which :func:`to_host` knows."""
    array = np.asarray(values, dtype=dtype)
    tensor = torch.from_numpy(array).to(device, non_blocking=True)
    _kept.append(tensor)  # an id is for its life
    _values[id(tensor)] = array
    return tensor


class Drafts(Drafter):
    """Drafts a chain, or a tree, and reads all that a drafter may read."""

    name = "drafts"
    Options = DrafterOptions
    needs_hidden_states = needs_node_argmax = needs_rows = True

    def __init__(self, tree: TokenTree) -> None:
        super().__init__(DrafterOptions(), make_context())
        self._tree = tree

    def propose(self, requests: Any) -> list[TokenTree]:
        return [self._tree for _ in requests]


def run_steps(device: torch.device, adapter_class: Any, tree: TokenTree) -> Any:
    """Three steps of two requests with drafts; return the statistics."""
    drafts = torch.zeros(8, PLACES, dtype=torch.int64, device=device)
    states: Any = SimpleNamespace(
        max_num_reqs=8, max_model_len=60, num_speculative_steps=PLACES, draft_tokens=drafts
    )
    guard = GuardedDrafter(Drafts(tree), VOCAB, 30.0, logging.getLogger("tests.fake"))
    has_trees = adapter_class is V2TreeAdapter
    adapter = adapter_class(TreeVerifier(guard), not has_trees, states, device)
    adapter.runner = SimpleNamespace(
        use_pp=False,
        adaptive_verification=None,
        cudagraph_manager=None,
        draft_tokens_handler=SimpleNamespace(set_draft_tokens=lambda batch, drafts: None),
    )
    cache = torch.zeros(8, 2, 4, 6, device=device)
    adapter.cache_groups = [CacheGroup(0, (cache,))]
    adapter.begin()
    ids = ["a", "b"]
    params = SamplingParams(max_tokens=30)
    params.update_from_generation_config({}, 2)
    requests = [
        NewRequestData(name, [7, 8], [], params, None, (), 0, None, prefill_token_ids=[7, 8])
        for name in ids
    ]
    adapter.add_requests(requests)
    for number in range(3):
        places = {name: [-1] * PLACES for name in ids} if number else {}
        num_tokens = PLACES + 1 if number else 2
        scheduled: Any = SimpleNamespace(
            scheduled_new_reqs=[],
            num_scheduled_tokens=dict.fromkeys(ids, num_tokens),
            scheduled_spec_decode_tokens=places,
            total_num_scheduled_tokens=2 * num_tokens,
        )
        output = adapter.launch(scheduled)
        lengths = [len(output.scheduled_spec_decode_tokens.get(name, ())) for name in ids]
        counts = np.array([output.num_scheduled_tokens[name] for name in ids])
        rows = np.cumsum([0, *(1 + length for length in lengths)])
        starts = np.cumsum([0, *counts])
        batch: Any = SimpleNamespace(
            req_ids=ids,
            num_reqs=2,
            idx_mapping=on(device, [2, 3]),
            cu_num_logits=on(device, rows, np.int32),
            cu_num_logits_np=rows,
            query_start_loc_np=starts,
            num_scheduled_tokens=counts,
            num_draft_tokens=sum(lengths),
            num_draft_tokens_per_req=np.array(lengths),
            positions=on(device, np.arange(starts[-1])),
            input_ids=on(device, np.zeros(starts[-1]), np.int32),
            logits_indices=on(device, np.arange(rows[-1])),
        )
        adapter.go_on("inputs", batch)
        adapter.go_on("positions", [on(device, np.arange(starts[-1]))])
        adapter.go_on("masks")
        logits = torch.zeros(rows[-1], VOCAB, device=device)
        placed = adapter.go_on("logits", logits)
        if placed is not None:
            sampled = logits.argmax(dim=-1)
            walked = walk_trees(sampled, *placed, batch.cu_num_logits, PLACES + 1)
            adapter.go_on("path", (batch.logits_indices, walked.rows))
        tokens = np.full((2, PLACES + 1), 9)
        tokens[:, 0] = tree.token_ids[-1]
        adapter.go_on("tokens", (on(device, tokens), on(device, [1 + bool(number)] * 2)))
        hidden_states = torch.zeros(starts[-1], 4, device=device)
        drafts[batch.idx_mapping] = adapter.propose(batch, hidden_states, PLACES)
        adapter.draft()
    return adapter.trees.totals


def chains(device: torch.device) -> None:
    totals = run_steps(device, v2_adapter.V2Adapter, TokenTree.from_lists([11, 12], [-1, 0]))
    assert totals.tokens > totals.steps


def trees(device: torch.device) -> None:
    totals = run_steps(device, V2TreeAdapter, TokenTree.from_lists([11, 12, 13], [-1, -1, -1]))
    assert totals.tokens > totals.steps


def beams(device: torch.device) -> None:
    """Two steps, the second with a new tail block for each beam."""
    tails = np.array([[1], [2]], dtype=np.int32)
    step: Any = BeamStep("p", 4, 4, np.array([5, 6]), (np.array([0]),), (tails,), None)
    of_group = DeviceBeams(step, device)
    caches = [torch.zeros(8, 2, 4, 6, device=device) for _ in range(2)]
    for number, fresh in enumerate((tails[:, :0], tails + 2)):
        totals = None if number else np.zeros(2, dtype=np.float32)
        selection = TokenSelection("p", totals, 4, stop_token_ids=(2,))
        of_group.launch(torch.zeros(2, VOCAB, device=device), selection)
        of_group.go_on([fresh], caches, 8)


@triton.jit
def _store(pointer):  # type: ignore[no-untyped-def]
    triton.language.store(pointer, 1)


def controls_of(device: torch.device) -> dict[str, Callable[[], object]]:
    on_device, on_host = torch.zeros(4, device=device), torch.ones(4)
    index = torch.from_numpy(np.array([1, 2]))
    return {
        "read": lambda: on_device[0].item(),
        "mask": lambda: on_device[on_device > 0],
        "copy": lambda: on_device.copy_(on_host),
        "copy to the host": lambda: on_device.to("cpu"),
        "index": lambda: on_device[index],
        "assignment": lambda: on_device.__setitem__(index, 1.0),
        "operand": lambda: torch.cat([on_device, on_host]),
        "kernel": lambda: _store[(1,)](on_host),
        "queued copy": lambda: on_device.copy_(on_host, non_blocking=True),
        "number": lambda: on_device * on_host[0],
    }


def main() -> None:
    backend_registration._setup_privateuseone_for_python_backend("pretended")
    result: dict[str, Any] = {}
    controls: dict[str, list[str]] = {}
    with fake_device() as (watch, device):
        for scene in (chains, trees, beams):
            scene(device)
            result[scene.__name__], watch.faults = watch.faults, []
        for name, call in controls_of(device).items():
            with contextlib.suppress(Exception):
                call()
            controls[name], watch.faults = watch.faults, []
    print("RESULT " + json.dumps({**result, "controls": controls}))


if __name__ == "__main__":
    main()
