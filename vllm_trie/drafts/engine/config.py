"""The speculative method and its options, which :mod:`.start.translate` has put into the plugin's
part of vLLM's ``additional_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from pydantic import BaseModel, Field, create_model

from vllm_trie.drafts import DrafterOptions, available_methods, parse_options
from vllm_trie.drafts.registry import validated
from vllm_trie.extras import loaded
from vllm_trie.hooks.start.additional_config import BEAM_KEYS, CONFIG_KEY, own_part
from vllm_trie.refusal import RefusedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VERIFICATION = "verification"
"""How drafts are verified; start-up replaces "auto" by what it chose."""
Verification = Literal["auto", "tree", "chain"]

PROPOSER_CLASS = "vllm_trie.drafts.engine.runners.v1.V1Speculation"
SPECULATOR_CLASS = "vllm_trie.drafts.engine.runners.v2.HostSpeculator"
"""What vLLM is told to draft with, on Model Runner V1 and on V2."""
CPU_WORKER_CLASS = "vllm_trie.drafts.engine.workers.cpu_worker.TreeCPUWorker"
GPU_WORKER_CLASS = "vllm_trie.drafts.engine.workers.cuda_worker.TreeGPUWorker"


class EngineOptions(DrafterOptions):
    """Options of tree speculation that every method has."""

    verification: Verification = Field(
        default="auto",
        description="'tree' verifies trees; 'chain' verifies drafts without branches by vLLM's own "
        "rejection sampler; 'auto' takes trees where they are supported and chains elsewhere.",
    )
    node_budget: Literal["adaptive", "fixed"] = Field(
        default="adaptive",
        description="'adaptive' verifies the nodes that make the most tokens per second, down to "
        "none; 'fixed' verifies all drafted nodes.",
    )
    launch_ahead: bool = Field(
        default=True,
        description="Launch steps ahead of their drafts, for which the GPU then waits instead of "
        "for the launch. Takes effect on Model Runner V2 with asynchronous scheduling, for chains "
        "that one GPU verifies, without LoRA, KV connectors, attention in chunks, trained "
        "drafters, and drafters that read hidden states.",
    )
    draft_timeout_s: float = Field(
        default=10.0,
        gt=0.0,
        le=600.0,
        description="Seconds that one call of the drafter may take; a drafter that took longer is "
        "suspended for a minute, then for twice as long each time. A call that never returns "
        "blocks the engine.",
    )


AllOptions: type[EngineOptions] = create_model(
    "AllOptions", __base__=(*reversed([*loaded("options")]), EngineOptions)
)
"""The options that every method has, those of extras included: an instance of their classes too."""


class Speculator(Protocol):
    """A trained drafter of vLLM's own that a method drafts with; its options."""

    @property
    def method(self) -> str:
        """vLLM's name of its method."""

    @property
    def model(self) -> str | None:
        """Folder or name of its checkpoint, None for one that the model has."""

    def check(self, vllm_config: VllmConfig, options: EngineOptions) -> None:
        """Refuse a complete configuration that it cannot draft in."""

    def configuration(self, vllm_config: VllmConfig) -> VllmConfig:
        """Return the configuration that vLLM makes it with."""

    def attach(self, speculator: Any, adapter: Any) -> None:
        """Hand the method's drafter what vLLM has made, on Model Runner V2.

        Args:
            speculator: vLLM's.
            adapter: The :class:`~vllm_trie.drafts.engine.runners.v2_adapter.V2Adapter`, which
                drafts with the method.
        """


class TreeConfig(NamedTuple):
    """The speculation that was asked for, as workers read it."""

    method: str
    draft_model: str | None
    drafter_options: BaseModel
    engine_options: EngineOptions

    @property
    def speculator(self) -> Speculator | None:
        """The trained drafter of vLLM's that takes part, if one does."""
        options: Speculator | None = getattr(self.drafter_options, "speculator", None)
        return options


def read(vllm_config: VllmConfig) -> TreeConfig | None:
    """Return the tree configuration that :func:`translate` wrote, None if there is none."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    payload = own_part(vllm_config.additional_config)
    if "method" in payload:
        return parse_payload(payload)
    if speculative.model in (PROPOSER_CLASS, SPECULATOR_CLASS):
        raise RefusedError(
            f"additional_config[{CONFIG_KEY!r}] names no method, but the speculative model is "
            f"{speculative.model}; set speculative_config={{'method': NAME}} with one of "
            f"{', '.join(available_methods())} instead of naming the class"
        )
    return None  # another method of vLLM's, without the plugin


def parse_payload(payload: Mapping[str, Any]) -> TreeConfig:
    """Check the method in the plugin's part, and its options."""
    return parse({k: v for k, v in payload.items() if k not in BEAM_KEYS})


def verification(vllm_config: VllmConfig) -> Literal["tree", "chain"]:
    """Return what :func:`set_verification` chose for the engine."""
    chosen: Literal["tree", "chain"] = own_part(vllm_config.additional_config)[VERIFICATION]
    return chosen


def set_verification(vllm_config: VllmConfig, chosen: Literal["tree", "chain"]) -> None:
    """Let the workers read how drafts are verified, in place of "auto"."""
    additional: Any = vllm_config.additional_config
    additional[CONFIG_KEY] = {**additional[CONFIG_KEY], VERIFICATION: chosen}


def parse(payload: Mapping[str, Any]) -> TreeConfig:
    """Check a method with its options and fill in the defaults."""
    options = dict(payload)
    method = options.pop("method")
    draft_model = options.pop("draft_model", None)
    if draft_model is not None and not isinstance(draft_model, str):
        raise RefusedError(
            f"the speculative model {draft_model!r} of method {method!r} must be a path or a name"
        )
    engine = {name: options.pop(name) for name in AllOptions.model_fields if name in options}
    engine_options = validated(AllOptions, engine, method)
    try:
        drafter_options = parse_options(method, options)
    except RefusedError as error:
        every_method = ", ".join(AllOptions.model_fields)
        raise RefusedError(f"{error} (every method also has: {every_method})") from None
    return TreeConfig(method, draft_model, drafter_options, engine_options)
