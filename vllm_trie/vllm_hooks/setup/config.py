"""From engine arguments to a configuration that vLLM accepts, and back in the workers.

vLLM's ``SpeculativeConfig`` knows a fixed list of methods and refuses unknown keys. The plugin
therefore rewrites one of its methods to one of vLLM's (:mod:`.runner_choice`) with the plugin's
proposer as its model, and carries the method's name and options in
``additional_config["vllm_trie"]``. A union with a trained drafter becomes that drafter's method of
vLLM's, which loads its weights and gives it a KV cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_trie.drafters import available_methods, parse_options
from vllm_trie.drafters.neural import NEURAL_METHODS, NeuralOptions
from vllm_trie.vllm_hooks.ledger import offered
from vllm_trie.vllm_hooks.setup import arguments, runner_choice
from vllm_trie.vllm_hooks.setup.config_keys import (
    ALLOW_GPU,
    BEAM_KEYS,
    CONFIG_KEY,
    VERIFICATION,
    Verification,
    own_part,
    spelled,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

PROPOSER_CLASS = "vllm_trie.vllm_hooks.worker.drafting.proposer.TreeProposer"
VERIFIER_CLASS = "vllm_trie.vllm_hooks.worker.runners.patched_runner.TreeDraftVerifier"
"""The proposer for a patched vLLM, whose runner lets it verify its drafts."""
CPU_WORKER_CLASS = "vllm_trie.vllm_hooks.worker.cpu_worker.TreeCPUWorker"
GPU_WORKER_CLASS = "vllm_trie.vllm_hooks.worker.cuda_worker.TreeGPUWorker"
DEFAULT_NODES = 32
DEFAULT_CHAIN = 8
"""The default on Model Runner V2, whose scheduler makes room for as many in every request."""
DEFAULT_GPU_NODES = 31
"""The default of trees on Model Runner V2: with the committed token and 4 query heads for a KV head
they fill 128 rows, the most that the kernel multiplies with keys and values it has read once."""
_TIERS = (16, 64)
"""Largest batches with full and with half of the draft tokens, where CUDA graphs take one length
for all requests. By estimate: an 8B model verifies 8 for each of 64 in the time of 2 steps."""
MAX_NODES = 256
"""Largest node budget: beyond it a tree costs more than it gains on any known hardware."""


class EngineOptions(BaseModel):
    """Options of tree speculation that every method has."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    verification: Verification = Field(
        default="auto",
        description="'tree' verifies trees by the plugin's attention; 'chain' verifies drafts "
        "without branches by vLLM's attention and rejection sampler, on every model that vLLM "
        "speculates with; 'auto' takes trees where they are supported and chains elsewhere.",
    )
    node_budget: Literal["adaptive", "fixed"] = Field(
        default="adaptive",
        description="'adaptive' spends nodes where they bring the most tokens per second, down to "
        "none when the machine is busy or drafts fail; 'fixed' verifies all that were drafted.",
    )
    draft_timeout_s: float = Field(
        default=10.0,
        gt=0.0,
        le=600.0,
        description="Longest time that one call of the drafter may take, seconds; a drafter that "
        "took longer rests for a minute, and twice as long after each further time. The check "
        "comes after the call: a call that never returns blocks the engine.",
    )
    store_path: str | None = Field(
        default=None,
        description="A folder for a warm start: what requests left to draft from is "
        "saved there, every minute and at shutdown, and read at the next start. "
        "Engines of one model may share it. Its files hold text of users. Without it nothing is "
        "written.",
    )
    store_reload_minutes: float | None = Field(
        default=None,
        gt=0.0,
        le=1440.0,
        description="With store_path: how often a running engine reads what other engines have "
        "saved there since. Left out: only at its start.",
    )
    allow_untested_gpu: bool = Field(
        default=False,
        description="Allow trees on an NVIDIA GPU, where they have never run. With "
        "verification='tree' the engine compares tree attention with exact results on your device "
        "at start-up and does not start if they differ. Switches native beam search on there too, "
        "for which it may stand in additional_config without a method. Chains need no permission. "
        "Does nothing on a CPU.",
    )
    trace_path: str | None = Field(
        default=None,
        description="An existing folder for traces. A request may then ask for its trace with "
        "speculation_trace: a file with its text and its trees, for `vllm-trie explore`.",
    )


class TreeConfig(NamedTuple):
    """The speculation that was asked for, as workers read it."""

    method: str
    draft_model: str | None
    drafter_options: BaseModel
    engine_options: EngineOptions

    @property
    def neural(self) -> NeuralOptions | None:
        """The trained drafter of vLLM's that takes part, if one does."""
        found: NeuralOptions | None = getattr(self.drafter_options, "neural", None)
        return found


def requested_method(engine_args: EngineArgs) -> str | None:
    """Return the tree method that the engine arguments ask for, None if they ask for another.

    Raises:
        ValueError: a method's name stands where a dictionary is expected.
    """
    speculative: Any = engine_args.speculative_config or {}
    methods = available_methods()
    if not isinstance(speculative, Mapping):
        for name in (speculative, engine_args.spec_method, engine_args.spec_model):
            if name in methods:
                raise ValueError(
                    f"speculative_config={speculative!r} must be a dictionary; write "
                    f"speculative_config={{'method': {name!r}}}"
                )
        speculative = {}  # vLLM has its own message for it
    named = (
        engine_args.spec_method,
        speculative.get("method"),
        engine_args.spec_model,
        speculative.get("model"),
    )
    for name in named:
        if name in methods:
            return str(name)
    if PROPOSER_CLASS in named or VERIFIER_CLASS in named or named[1] in NEURAL_METHODS:
        return own_part(engine_args.additional_config).get("method")
    return None


def translate(engine_args: EngineArgs) -> None:
    """Rewrite the engine arguments, in place, into a configuration that stock vLLM accepts.

    Does nothing if they ask for no method of vllm-trie; may be called again on its own result.

    Raises:
        ValueError: an option or a combination is not allowed, or a method is misspelled.
    """
    method = requested_method(engine_args)
    if method is None:
        arguments.refuse_misspelled_method(engine_args)
        _refuse_options_without_method(engine_args)
        return
    asked, given = _asked_for(engine_args), _own_options(engine_args, method)
    carried_method = own_part(engine_args.additional_config).get("method")
    if asked.get("method") in NEURAL_METHODS and carried_method:  # this function wrote them
        asked |= {"method": method, "model": None}
    _check_method(method, asked.pop("method", None))
    carried_model = given.pop("draft_model", None)
    if (draft_model := _draft_model(method, asked.pop("model", None))) is None:
        draft_model = carried_model
    stands_for = runner_choice.stands_for()
    asked_nodes = asked.pop("num_speculative_tokens", None)

    known = _speculative_config_fields()
    passed_on = {key: asked.pop(key) for key in list(asked) if key in known}
    _refuse_other_methods_options(method, passed_on)
    for key, value in given.items():
        _add(asked, key, value, spelled(key))
    carried = {"method": method, **asked}
    if draft_model is not None:
        carried["draft_model"] = draft_model
    parsed = _parse(carried)  # the errors should reach the user now, not in a worker
    is_v2 = stands_for == runner_choice.V2_METHOD
    on_v2 = DEFAULT_GPU_NODES if parsed.engine_options.verification == "tree" else DEFAULT_CHAIN
    num_nodes = _check_num_nodes(asked_nodes, on_v2 if is_v2 else DEFAULT_NODES)
    if is_v2 and parsed.neural is None and not runner_choice.takes_any_length(engine_args):
        passed_on.setdefault("num_speculative_tokens_per_batch_size", _tiers(num_nodes))

    model: str | None = VERIFIER_CLASS if offered("draft_verifier") else PROPOSER_CLASS
    if parsed.neural is not None:
        stands_for, model = parsed.neural.method, parsed.neural.model
    engine_args.spec_method = engine_args.spec_model = engine_args.spec_tokens = None
    engine_args.speculative_config = {
        **passed_on,
        "method": stands_for,
        "model": model,
        "num_speculative_tokens": num_nodes,
    }
    additional = dict(engine_args.additional_config or {})
    beam = {k: v for k, v in additional.get(CONFIG_KEY, {}).items() if k in BEAM_KEYS}
    engine_args.additional_config = {**additional, CONFIG_KEY: {**beam, **carried}}


def read(vllm_config: VllmConfig) -> TreeConfig | None:
    """Return the tree configuration that :func:`translate` wrote, None if there is none."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    carried = own_part(vllm_config.additional_config)
    if speculative.model not in (PROPOSER_CLASS, VERIFIER_CLASS):
        # Of a trained drafter, or another method of vLLM's without the plugin.
        return _parse_carried(carried) if "method" in carried else None
    if "method" not in carried:
        raise ValueError(
            f"additional_config[{CONFIG_KEY!r}] names no method, but the speculative model is "
            f"{speculative.model}; set speculative_config={{'method': NAME}} with one of "
            f"{', '.join(available_methods())} instead of naming the class"
        )
    return _parse_carried(carried)


def _parse_carried(carried: Mapping[str, Any]) -> TreeConfig:
    return _parse({k: v for k, v in carried.items() if k not in BEAM_KEYS})


def verification(vllm_config: VllmConfig) -> Literal["tree", "chain"]:
    """Return what :func:`set_verification` chose for the engine."""
    chosen: Literal["tree", "chain"] = own_part(vllm_config.additional_config)[VERIFICATION]
    return chosen


def set_verification(vllm_config: VllmConfig, chosen: Literal["tree", "chain"]) -> None:
    """Let the workers read how drafts are verified, in place of "auto"."""
    additional: Any = vllm_config.additional_config
    additional[CONFIG_KEY] = {**additional[CONFIG_KEY], VERIFICATION: chosen}


def _refuse_options_without_method(engine_args: EngineArgs) -> None:
    idle = own_part(engine_args.additional_config).keys() - BEAM_KEYS - {ALLOW_GPU}
    if idle:
        raise ValueError(
            f"additional_config[{CONFIG_KEY!r}] sets {', '.join(sorted(idle))}, but no speculative "
            "method of vllm-trie is asked for; name one with --spec-method or "
            f"speculative_config={{'method': NAME}}: {', '.join(available_methods())}"
        )


def _refuse_other_methods_options(method: str, passed_on: Mapping[str, Any]) -> None:
    """Refuse fields of vLLM's that only its own `ngram` and `suffix` read."""
    foreign = [key for key in passed_on if key.startswith(("prompt_lookup_", "suffix_decoding_"))]
    if foreign:
        raise ValueError(
            f"speculative_config sets {', '.join(foreign)}, which method {method!r} does not read: "
            "it finds the lengths of its contexts and drafts by itself; leave them out"
        )


def _add(asked: dict[str, Any], key: str, value: Any, place: str) -> None:
    """Add a setting from another place; where both have it, they must agree."""
    if asked.setdefault(key, value) != value:
        raise ValueError(
            f"{place}={value!r} and speculative_config[{key!r}]={asked[key]!r} differ; give one "
            "of them"
        )


def _asked_for(engine_args: EngineArgs) -> dict[str, Any]:
    """Return ``speculative_config`` with what the short flags say."""
    given = engine_args.speculative_config or {}
    asked = {key.replace("-", "_"): value for key, value in given.items()}
    for flag, key, value in (
        ("--spec-method", "method", engine_args.spec_method),
        ("--spec-model", "model", engine_args.spec_model),
        ("--spec-tokens", "num_speculative_tokens", engine_args.spec_tokens),
    ):
        if value is not None:
            _add(asked, key, value, flag)
    return asked


def _own_options(engine_args: EngineArgs, method: str) -> dict[str, Any]:
    """Return the options of the method that ``additional_config`` carries."""
    additional = engine_args.additional_config or {}
    if not isinstance(additional, Mapping):
        raise ValueError(
            f"additional_config={additional!r} must be a mapping to carry the options of "
            f"method {method!r}; pass a dictionary"
        )
    given = {key: value for key, value in own_part(additional).items() if key not in BEAM_KEYS}
    named = given.pop("method", method)
    if named != method:
        raise ValueError(
            f"method {method!r} and {spelled('method')}={named!r} differ; give one of them"
        )
    return given


def _check_method(method: str, named: Any) -> None:
    if named not in (None, method, runner_choice.V1_METHOD, runner_choice.V2_METHOD):
        raise ValueError(
            f"the speculative model {method!r} is a method of vllm-trie, but method={named!r} was "
            f"asked for; leave the model out or set method={method!r}"
        )


def _draft_model(method: str, model: Any) -> Any:
    """Return the model that the drafter should load, None if the name is only the method's."""
    if model in (method, PROPOSER_CLASS, VERIFIER_CLASS):
        return None
    if model in available_methods():
        raise ValueError(
            f"the methods {method!r} and {model!r} (as the speculative model) differ; give one of "
            "them, or ask for trie_union with both among its drafters"
        )
    return model


def _check_num_nodes(value: Any, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_NODES:
        raise ValueError(
            f"num_speculative_tokens={value!r} is the node budget of a request's draft tree and "
            f"must be a whole number from 1 to {MAX_NODES}; leave it out for {default}"
        )
    return value


def _tiers(num_nodes: int) -> list[tuple[int, int, int]]:
    """Return vLLM's schedule: first and last batch size, and draft tokens of each request."""
    full, half = _TIERS
    return [(1, full, num_nodes), (full + 1, half, num_nodes // 2), (half + 1, 1 << 20, 0)]


def _speculative_config_fields() -> frozenset[str]:
    from vllm.config import SpeculativeConfig

    return frozenset(field.name for field in dataclasses.fields(SpeculativeConfig))


def _parse(carried: Mapping[str, Any]) -> TreeConfig:
    """Check the carried mapping and fill in the defaults."""
    options = dict(carried)
    method = options.pop("method")
    draft_model = options.pop("draft_model", None)
    if draft_model is not None and not isinstance(draft_model, str):
        raise ValueError(
            f"the speculative model {draft_model!r} of method {method!r} must be a path or a name"
        )
    engine = {name: options.pop(name) for name in EngineOptions.model_fields if name in options}
    try:
        engine_options = EngineOptions.model_validate(engine)
    except ValidationError as error:
        problems = "; ".join(f"{p['loc'][0]}={p['input']!r}: {p['msg']}" for p in error.errors())
        raise ValueError(f"options of method {method!r}: {problems}") from None
    try:
        drafter_options = parse_options(method, options)
    except ValueError as error:
        every_method = ", ".join(EngineOptions.model_fields)
        raise ValueError(f"{error} (every method also has: {every_method})") from None
    return TreeConfig(method, draft_model, drafter_options, engine_options)
