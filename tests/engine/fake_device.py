"""Steps of Model Runner V2's adapter and of beams on a device that is not there.

Tensors are fake: they have a device, and no values. The device is one of another make than CPUs and
GPUs, which torch lets Python register; the host's arrays are real. Kernels are not run. Noted are
reads of a device's values, copies that are not queued, and operands, indices and kernels' arguments
on the wrong side. A program of its own, as a process has one such device. Prints one JSON object.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, get_args

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

from tests.extras.items.unit.catalogues import random_items, trie_of
from tests.unit.drafters.support import VOCAB, make_context
from tests.unit.hooks.beam_runner import NUM_BLOCKS, BeamRunner
from tests.unit.hooks.v2_steps import WIDTH, Steps
from vllm_trie.drafts import Drafter, DrafterOptions
from vllm_trie.drafts.budget import NodeBudget
from vllm_trie.drafts.engine.runners import v2_adapter, v2_delivery
from vllm_trie.drafts.engine.runners.adapter import Part
from vllm_trie.drafts.engine.runners.v2_adapter import V2Adapter
from vllm_trie.drafts.engine.runners.v2_trees import V2TreeAdapter
from vllm_trie.drafts.engine.verification.compaction import CacheGroup, moves_of
from vllm_trie.drafts.engine.verification.kernels import walk_trees
from vllm_trie.extras.items.step import ItemStep
from vllm_trie.extras.items.trie import ItemTrie
from vllm_trie.extras.items.worker import ItemSelection
from vllm_trie.searches.engine.search_wire import BeamStep, TokenSelection
from vllm_trie.tree import TokenTree

aten = torch.ops.aten


class Watch(TorchDispatchMode):
    """Notes what a device would wait for or refuse, with its place.

    Attributes:
        faults: So far, each once.
        calls: What the plugin launched so far, its waits, and what vLLM did in between.
    """

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.calls: list[str] = []

    def note(self, fault: str) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame and not re.search("/vllm_trie/|/vllm/", frame.f_code.co_filename):
            frame = frame.f_back
        place = frame.f_code.co_qualname if frame else "the program"
        if (said := f"{fault} in {place}") not in self.faults:
            self.faults.append(said)

    def count(self, call: str) -> None:
        """Add a call, unless the program's own part of a step makes it."""
        frame: FrameType | None = sys._getframe(1)
        while frame and not re.match(r"(vllm_trie|tests\.unit)\.", frame.f_globals["__name__"]):
            frame = frame.f_back
        if frame and frame.f_globals["__name__"].startswith("vllm_trie."):
            self.calls.append(call)

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
        on_device = kinds - {"cpu"} or str(kwargs.get("device", "cpu")) != "cpu"
        if on_device and not func.is_view and func.namespace == "aten":
            self.count(func.overloadpacket.__name__)
        try:
            return func(*args, **kwargs)
        except Exception as error:
            self.note(type(error).__name__)
            raise


@contextlib.contextmanager
def fake_device() -> Iterator[tuple[Watch, torch.device]]:
    """Let tensors be fake, and kernels do nothing; copies to the host are zeros, or known."""
    watch = Watch()

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if any(t.device.type == "cpu" for t in (*args, *kwargs.values()) if torch.is_tensor(t)):
            watch.note("a kernel with an argument on the host")
        watch.count(self.fn.__name__)

    class Event(v2_on_cpu.Event):
        def synchronize(self) -> None:
            watch.calls.append("wait")

    class SharedMemory:
        def __init__(self, size: Any, dtype: torch.dtype) -> None:
            self.np = np.zeros(size, dtype=str(dtype).removeprefix("torch."))
            self._on_device = torch.zeros(size, dtype=dtype, device=StepsOnDevice.device)

        def uva(self) -> torch.Tensor:
            return self._on_device

    def to_host(tensor: torch.Tensor) -> np.ndarray:
        tensor.to("cpu", non_blocking=True)
        zeros = np.zeros(tensor.shape, dtype=str(tensor.dtype).removeprefix("torch."))
        return _on_device.get(id(tensor), (tensor, zeros))[1]

    assign = torch.Tensor.__setitem__

    def assign_watched(self: torch.Tensor, index: Any, value: Any) -> None:
        by_tensor = any(map(torch.is_tensor, tree_leaves(index)))
        if by_tensor and self.device.type != "cpu" and not torch.is_tensor(value):
            watch.note("a number that CUDA copies and waits for")
        assign(self, index, value)

    torch.Tensor.__setitem__ = assign_watched  # type: ignore[method-assign]
    InterpretedFunction.run = launch
    v2_adapter.async_copy_to_np = to_host
    torch.cuda.Event = Event
    v2_delivery.buffer_utils.UvaBuffer = SharedMemory
    v2_delivery.is_uva_available = lambda: True

    def pin_memory(self: torch.Tensor) -> torch.Tensor:
        watch.calls.append("pin")
        return self

    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign]
    torch.Tensor.data_ptr = lambda self: id(self)  # type: ignore[method-assign]
    with FakeTensorMode(allow_non_fake_inputs=True), watch:
        StepsOnDevice.device = torch.device("pretended", 0)
        StepsOnDevice.calls = watch.calls
        yield watch, StepsOnDevice.device


_on_device: dict[int, tuple[torch.Tensor, np.ndarray]] = {}
"""Tensors whose values are known, by id."""


class Drafts(Drafter):
    """Drafts one tree, and reads all that a drafter may read."""

    name = "drafts"
    Options = DrafterOptions
    needs_hidden_states = needs_node_argmax = needs_rows = True

    def __init__(self, tree: TokenTree) -> None:
        super().__init__(DrafterOptions(), make_context())
        self._tree = tree

    def propose(self, requests: Any) -> list[TokenTree]:
        return [self._tree for _ in requests]


class TextDrafts(Drafts):
    """Drafts one tree, and reads nothing that is on the device."""

    needs_hidden_states = needs_node_argmax = needs_rows = False


class Pausing(NodeBudget):
    """Pauses from its first step on."""

    def should_draft(self, num_requests: int) -> bool:
        return False


class StepsOnDevice(Steps):
    """Steps of two requests whose last drafted node is accepted, and a pause of drafting.

    Args:
        drafter: Of one tree.
        adapter_class: Of chains or trees.
        launches_ahead: Whether steps are launched ahead of their drafts.
    """

    calls: list[str]

    def __init__(
        self, drafter: Drafts, adapter_class: type[V2Adapter], launches_ahead: bool = False
    ) -> None:
        super().__init__(drafter, adapter_class, launches_ahead)
        tree, resume = drafter._tree, self.adapter.resume

        def noted(part: Any, made: Any = None) -> Any:
            result = resume(part, made)
            self.calls.append(part)
            return result

        self.adapter.resume = noted  # type: ignore[method-assign]
        cache = torch.zeros(8, 2, 4, 6, device=self.device)
        self.adapter.cache_groups = [CacheGroup(0, (cache,), moves_of("vec"))]
        for name in "ab":
            self.add(name, [7, 8])
        accepted = [tree.token_list[-1], 9]
        for tokens in ([9], accepted, accepted):
            self.run_step(dict.fromkeys("ab", tokens), WIDTH)
        self.adapter.verifier.budget = Pausing()
        for tokens in (accepted, [9], [9]):  # the last drafts are verified yet
            self.run_step(dict.fromkeys("ab", tokens), WIDTH)
        assert self.adapter.verifier.totals.tokens > self.adapter.verifier.totals.steps

    def on_device(self, values: Any, dtype: Any = np.int64) -> torch.Tensor:
        array = np.asarray(values, dtype=dtype)
        tensor = torch.from_numpy(array).to(self.device, non_blocking=True)
        _on_device[id(tensor)] = tensor, array
        return tensor

    def verify(self, batch: Any) -> Any:
        logits = torch.zeros(batch.cu_num_logits_np[-1], VOCAB, device=self.device)
        placed = self.adapter.resume("logits", logits)
        if placed is not None:
            walked = walk_trees(logits.argmax(dim=-1), *placed, batch.cu_num_logits, WIDTH + 1)
            self.adapter.resume("path", (batch.logits_indices, walked.rows))
        return super().verify(batch)


LAYERS = 28
"""Of a model whose searches are counted."""
CHAIN = TokenTree.from_lists([11, 12], [-1, 0])


def chains(device: torch.device) -> None:
    StepsOnDevice(Drafts(CHAIN), V2Adapter)


def text_chains(device: torch.device) -> None:
    StepsOnDevice(TextDrafts(CHAIN), V2Adapter)


def chains_ahead(device: torch.device) -> None:
    StepsOnDevice(TextDrafts(CHAIN), V2Adapter, launches_ahead=True)


def trees(device: torch.device) -> None:
    StepsOnDevice(Drafts(TokenTree.from_lists([11, 12, 13], [-1, -1, -1])), V2TreeAdapter)


def beams(device: torch.device, count: int = 1, items: ItemTrie | None = None) -> list[str]:
    """Four steps of searches, the last one with new tail blocks; return the third's calls.

    Args:
        device: Where they run.
        count: Of the searches.
        items: Their catalogue, None for searches of tokens, whose children the device chooses.
    """
    width, prompt = 4, np.array([1, 2], dtype=np.int32)  # of one number a copy would be real
    tails = np.arange(3, 3 + width, dtype=np.int32)[:, None]
    caches = [torch.zeros(NUM_BLOCKS, 2, 4, 6, device=device) for _ in range(LAYERS)]
    runner, of_third = BeamRunner(device, caches), list[str]()
    totals = np.zeros(width, dtype=np.float32)
    for number in range(4):
        steps, selections = list[BeamStep](), list[Any]()
        for proxy in map(str, range(count)):
            is_ahead = number > 0 and items is None
            suffix = tails[:, : number // 3] if is_ahead else tails
            token_ids = None if is_ahead else tails[:, 0]
            steps.append(BeamStep(proxy, 32, 32 + number, token_ids, (prompt,), (suffix,), None))
            if items is None:
                of_host = None if is_ahead else totals
                selections.append(TokenSelection(proxy, of_host, 2 * width, stop_token_ids=(2,)))
            else:
                nodes = items.children(np.array([0])).nodes[:width]
                runner.beams.selector.parts.kept[ItemSelection, "items"] = {"": items}
                step = ItemStep(nodes, totals, width)
                place = "items", "", ""
                selections.append(ItemSelection(*place, proxy, "vocabulary", None, step))
        before = len(StepsOnDevice.calls)
        names = runner.begin_step(steps, selections)
        runner.select(names, torch.zeros(count * width, VOCAB, device=device))
        if number == 2:
            of_third = StepsOnDevice.calls[before:]
    return of_third


def launches_of_searches(device: torch.device) -> dict[str, dict[str, int]]:
    """The calls of a step, by what the searches are and how many."""
    with tempfile.TemporaryDirectory() as folder:
        catalogue = trie_of(Path(folder) / "items", random_items(0, 400, VOCAB, (3, 3)))
    result = {}
    for kind, items in (("free", None), ("items", catalogue)):
        for count in (1, 8):
            calls = Counter(beams(device, count, items))
            pinned, copies = calls.pop("pin"), calls["_to_copy"]
            result[f"{kind} {count}"] = {
                "launches": calls.total(), "copies": copies, "pinned": pinned
            }  # fmt: skip
    return result


@triton.jit
def _store(pointer):  # type: ignore[no-untyped-def]
    triton.language.store(pointer, 1)


def controls_of(device: torch.device) -> dict[str, Callable[[], object]]:
    on_device, on_host = torch.zeros(4, device=device), torch.ones(4)
    index = torch.from_numpy(np.array([1, 2]))
    places = torch.zeros(2, dtype=torch.int64, device=device)
    return {
        "read": lambda: on_device[0].item(),
        "mask": lambda: on_device[on_device > 0],
        "copy": lambda: on_device.copy_(on_host),
        "copy to the host": lambda: on_device.to("cpu"),
        "index": lambda: on_device[index],
        "assignment": lambda: on_device.__setitem__(index, 1.0),
        "number assigned": lambda: on_device.__setitem__(places, 1.0),
        "operand": lambda: torch.cat([on_device, on_host]),
        "kernel": lambda: _store[(1,)](on_host),
        "queued copy": lambda: on_device.copy_(on_host, non_blocking=True),
        "number": lambda: on_device * on_host[0],
    }


def after_waits(calls: list[str]) -> list[list[str]]:
    """What the plugin launches after each wait, until vLLM goes on."""
    waits = [at for at, call in enumerate(calls) if call == "wait"]
    after = [
        itertools.takewhile(lambda c: c not in get_args(Part), calls[at + 1 :]) for at in waits
    ]
    return [list(some) for some in after]


def main() -> None:
    backend_registration._setup_privateuseone_for_python_backend("pretended")
    result: dict[str, Any] = {}
    controls: dict[str, list[str]] = {}
    calls: dict[str, list[list[str]]] = {}
    with fake_device() as (watch, device):
        for scene in (chains, text_chains, chains_ahead, trees):
            watch.calls.clear()
            scene(device)
            result[scene.__name__], watch.faults = watch.faults, []
            calls[scene.__name__] = after_waits(watch.calls)
        launches = launches_of_searches(device)
        result["beams"], watch.faults = watch.faults, []
        for name, call in controls_of(device).items():
            with contextlib.suppress(Exception):
                call()
            controls[name], watch.faults = watch.faults, []
    print(
        "RESULT "
        + json.dumps({**result, "controls": controls, "calls": calls, "launches": launches})
    )


if __name__ == "__main__":
    main()
