"""From the user's words to an engine: what is taken, what is refused and how."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm import SamplingParams, envs
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.engine.compare import (
    generate,
    margins,
    plain_outputs,
    register_test_drafters,
    speculation,
)
from tests.engine.families import FAMILIES, stand_in_for_torchvision, write_config
from tests.engine.prompts import prompts
from tests.processes import environment, run_python
from vllm_trie.drafts import available_methods
from vllm_trie.drafts.engine import config
from vllm_trie.drafts.engine.start import arguments as misspelled
from vllm_trie.drafts.engine.start.verifier_setup import drafter_context
from vllm_trie.hooks import ledger, plugin
from vllm_trie.hooks.ledger import Entry, record, table
from vllm_trie.hooks.start.limits import reason_off
from vllm_trie.lab.local_engine import verifier_of
from vllm_trie.lab.tiny_model import medusa_path, model_path
from vllm_trie.refusal import RefusedError

TREES = {"method": "ngram_trie", "num_speculative_tokens": 8}
CHAINS = {**TREES, "verification": "chain"}


pytestmark = pytest.mark.usefixtures("inspect_models_here")


@pytest.fixture(autouse=True)
def _test_drafters(monkeypatch):
    register_test_drafters(monkeypatch)


@pytest.fixture
def _qwen_vl(monkeypatch):
    stand_in_for_torchvision(monkeypatch)


def engine_config(**options: Any) -> Any:
    settings = {
        "model": str(model_path()),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "kv_cache_memory_bytes": 10 << 20,
        "skip_tokenizer_init": True,
        "speculative_config": dict(TREES),
        **options,
    }
    return EngineArgs(**settings).create_engine_config()


def refusal(**options: Any) -> str:
    """The message with which a configuration is refused."""
    with pytest.raises(RefusedError, match=r"\w") as caught:
        engine_config(**options)
    return str(caught.value)


# -- what is taken --------------------------------------------------------------------------------


def test_options_reach_the_drafter(engine):
    options = {
        "speculative_config": {**TREES, "max_context_len": 9},
        "additional_config": {"vllm_trie": {"index_output": False}, "theirs": 1},
    }
    llm = engine(**options)
    drafter = verifier_of(llm).guard.drafter
    assert drafter.options.max_context_len == 9
    assert drafter.options.index_output is False
    assert drafter.options.index_tokens == drafter.Options().index_tokens
    assert drafter.context.num_nodes == 8
    assert drafter.context.max_model_len == 1024
    assert drafter.context.vocab_size == 2048


def from_command_line(*words: str, arguments: type = AsyncEngineArgs) -> Any:
    load_general_plugins()
    parser = arguments.add_cli_args(FlexibleArgumentParser())
    fixed = ["--model", str(model_path()), "--dtype", "float32", "--enforce-eager"]
    fixed += ["--kv-cache-memory-bytes", str(10 << 20), "--max-model-len", "128"]
    return arguments.from_cli_args(parser.parse_args([*fixed, *words])).create_engine_config()


@pytest.mark.parametrize("arguments", [EngineArgs, AsyncEngineArgs])
@pytest.mark.parametrize(
    "words",
    [
        ["--spec-method", "ngram_trie"],
        ["--spec-model", "ngram_trie"],
        ["--speculative-model", "ngram_trie"],
        ["--speculative-config", '{"method": "ngram_trie"}'],
        ["--speculative-config.method", "ngram_trie"],
    ],
)
def test_command_line(words, arguments):
    vllm_config = from_command_line(*words, "--spec-tokens", "12", arguments=arguments)
    assert config.read(vllm_config).method == "ngram_trie"
    assert vllm_config.speculative_config.num_speculative_tokens == 12


@pytest.mark.parametrize("flag", ["--spec-method", "--spec-model", "--speculative-model"])
def test_heads_on_the_command_line(flag):
    """The flag that names the method leaves the dictionary's `model` to the heads."""
    heads = json.dumps({"model": str(medusa_path()), "revision": "1234"})
    for method in ("medusa_dynamic", "trie_union"):
        vllm_config = from_command_line(flag, method, "--speculative-config", heads)
        read = config.read(vllm_config)
        assert (read.method, read.draft_model) == (method, str(medusa_path()))
        assert drafter_context(vllm_config, read.draft_model).draft_revision == "1234"
        with pytest.raises(ValueError, match="needs the Medusa heads") as caught:
            from_command_line(flag, method)
        assert """--speculative-config '{"model": "HEADS"}'""" in str(caught.value)
    other = json.dumps({"method": "ngram_trie", "model": str(medusa_path())})
    with pytest.raises(ValueError, match="differ; give one of them"):
        from_command_line(flag, "medusa_dynamic", "--speculative-config", other)


def test_help_of_the_server():
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # since 0.33
        from vllm.entrypoints.common.cli_args import make_arg_parser
    said = make_arg_parser(FlexibleArgumentParser()).format_help()
    assert "--speculative-model" in said
    assert "ngram_trie" in said


# -- what is refused ------------------------------------------------------------------------------


WITHOUT_TREES = [name for name, family in FAMILIES.items() if family.drafts != "tree"]


@pytest.mark.parametrize("name", WITHOUT_TREES)
@pytest.mark.usefixtures("_qwen_vl")
def test_models_without_trees(tmp_path, name):
    family = FAMILIES[name]
    path = write_config(tmp_path / "model", family.config)
    settings = {"model": path, **family.engine}
    message = refusal(**settings, speculative_config={**TREES, "verification": "tree"})
    assert "'ngram_trie'" in message
    assert family.reason in message
    (architecture,) = json.loads((Path(path) / "config.json").read_text())["architectures"]
    assert architecture in message or "runner_type" in message or family.engine
    assert ("verification='chain'" in message) == (family.drafts == "chain")
    plain = engine_config(**settings, speculative_config=None)
    # Forks of beams copy whole blocks, which these models' caches do not allow, or do.
    served = name in ("DeepSeek V2", "fp8 KV cache")
    assert (reason_off(plain) is None) == served
    if family.drafts == "none":
        assert family.reason in refusal(**settings)
        assert family.reason in refusal(**settings, speculative_config=CHAINS)
        return
    # Without the option they are verified as chains, too: see test_compatibility.py.
    assert config.verification(engine_config(**settings, speculative_config=CHAINS)) == "chain"


def test_a_model_that_embeds_the_tokens_before_each_token():
    """Model Runner V2 keeps them by slot: those of beams and of accepted drafts would be wrong."""
    model = {"hf_overrides": {"architectures": ["LongcatFlashNgramForCausalLM"]}}
    plain = engine_config(**model, speculative_config=None)
    assert "LongcatFlashNgram" in (reason_off(plain) or "")
    for method in (TREES, CHAINS):
        assert "LongcatFlashNgram" in refusal(**model, speculative_config=method)


def test_diffusion_models_are_refused_by_name(plugin_log):
    """vLLM gives them a scheduler of its own."""
    model = {"diffusion_config": {"canvas_length": 8}}
    plain = engine_config(**model, speculative_config=None)
    assert "diffusion_scheduler" in plain.scheduler_config.scheduler_cls
    said = [reason_off(plain), *(refusal(**model, speculative_config=m) for m in (TREES, CHAINS))]
    plain.scheduler_config.get_scheduler_cls()
    for message in said:
        assert "diffusion models are not supported" in message
    assert "scheduler_cls" not in "".join([*said, plugin_log.text])


def test_a_model_without_trees_says_so_at_start_up(tmp_path, plugin_log):
    path = write_config(tmp_path / "model", FAMILIES["DeepSeek V2"].config)
    engine_config(model=path)
    assert "verified as chains" in plugin_log.text
    assert "(MLA) is not supported" in plugin_log.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"worker_cls": "theirs.Worker"}, ["worker_cls='theirs.Worker'", "'auto'"]),
        ({"scheduler_cls": "theirs.Scheduler"}, ["scheduler_cls='theirs.Scheduler'", "leave"]),
        ({"pipeline_parallel_size": 2}, ["pipeline_parallel_size=2", "VLLM_USE_V2_MODEL_RUNNER=1"]),
        (
            {"kv_cache_dtype": "fp8", "speculative_config": {**TREES, "verification": "tree"}},
            ["kv_cache_dtype='fp8'", "'auto'", "verification='chain'"],
        ),
        (
            {"kv_cache_dtype": "float16", "speculative_config": {**TREES, "verification": "tree"}},
            ["kv_cache_dtype='float16' is not the model's dtype", "'auto'"],
        ),
        (
            {
                "speculative_config": {**TREES, "verification": "tree"},
                "kv_transfer_config": KVTransferConfig(
                    kv_connector="ExampleConnector",
                    kv_role="kv_both",
                    kv_connector_extra_config={"shared_storage_path": "local_storage"},
                ),
            },
            ["kv_transfer_config", "leave"],
        ),
        *(
            (
                {"speculative_config": {"method": name}},
                [repr(name), "did you mean 'medusa_dynamic'?", *available_methods()],
            )
            for name in ("medusa-dynamic", "medusa_dynamik")
        ),
    ],
)
def test_settings_that_do_not_go_together(options, said):
    message = refusal(**options)
    for words in ("ngram_trie", *said):
        assert words in message


def test_model_runner_v2(monkeypatch):
    # Where an engine has run, vLLM reads no environment variable any more.
    monkeypatch.setitem(vars(envs), "VLLM_USE_V2_MODEL_RUNNER", True)
    with pytest.raises(ValueError, match="Model Runner V2 requires Triton"):  # by vLLM itself
        engine_config()


def test_an_unknown_method_is_vllms_to_refuse():
    with pytest.raises(Exception, match="no_such_method") as caught:
        engine_config(speculative_config={"method": "no_such_method", "num_speculative_tokens": 4})
    assert "vllm-trie" not in str(caught.value)


def test_a_misspelled_method_on_the_command_line(capsys):
    with pytest.raises(SystemExit):
        from_command_line("--spec-method", "ngram_tri")
    assert "ngram_trie" in capsys.readouterr().err  # among the choices
    with pytest.raises(ValueError, match=r"did you mean 'ngram_trie'\?"):
        from_command_line("--speculative-model", "ngram_tri")


def test_every_method_of_vllm_is_known():
    assert "ngram" in misspelled.vllm_methods()
    for name in misspelled.vllm_methods():
        assert misspelled.meant(name, misspelled.vllm_methods()) == ""


def test_methods_of_vllm_stay_as_they_are():
    vllm_config = engine_config(speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    assert vllm_config.speculative_config.method == "ngram"
    assert vllm_config.parallel_config.worker_cls != config.CPU_WORKER_CLASS
    assert config.read(vllm_config) is None


# -- the plugin in a process ----------------------------------------------------------------------


def wrapped() -> dict[str, Any]:
    """The functions of vLLM that the plugin replaces for speculation."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.loggers import StatLoggerManager

    return {
        "arguments": EngineArgs.add_cli_args,
        "config": EngineArgs.create_engine_config,
        "update": Scheduler.update_from_output,
        "loggers": StatLoggerManager.__init__,
    }


@pytest.fixture
def fresh_process(monkeypatch, plugin_log):
    """Registers the plugin as if for the first time; returns what it logged."""
    engine_config()
    monkeypatch.setattr(plugin, "_installed", {})
    present = len(ledger.patches_in_place())

    def register() -> list[str]:
        plugin_log.clear()
        plugin.register()
        plugin.register()
        return [r.getMessage() for r in plugin_log.records if r.name.startswith("vllm.vllm_trie")]

    yield register
    ledger.undo(keep=present)


def test_another_version_of_vllm(fresh_process, monkeypatch):
    """It is tried where all symbols fit; see tests/extras/device_checks for the check."""
    monkeypatch.setattr(vllm, "__version__", "0.31.2")
    assert fresh_process() == []
    assert plugin.status() == {"speculation": "ok", "beam": "ok"}


@pytest.mark.parametrize("why", ["VLLM_TRIE_UNLISTED=0", "nothing here could check it"])
def test_another_version_of_vllm_that_is_not_tried(fresh_process, monkeypatch, why):
    if why.startswith("VLLM_TRIE"):
        monkeypatch.setenv(*why.split("="))
    else:
        monkeypatch.setattr(table, "brought", lambda part: iter(()))
    before, present = wrapped(), len(ledger.patches_in_place())
    monkeypatch.setattr(vllm, "__version__", "0.31.2")
    messages = fresh_process()
    assert len(messages) == 2  # one for each of the two features
    for message in messages:
        assert "0.31.2" in message
        assert "0.32.x" in message
        assert "steps aside" in message
        assert why in message
        assert "vllm-trie doctor" in message
    assert set(plugin.status()) == {"speculation", "beam"}
    assert "ok" not in plugin.status().values()
    assert "has stepped aside: vLLM 0.31.2 is not a supported version" in refusal()
    ledger.undo(keep=present)
    assert wrapped() == before


_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"


@pytest.mark.parametrize(
    ("target", "aside"),
    [
        (f"{_SCHEDULER}._update_request_as_session", "speculation"),
        ("vllm.v1.structured_output:StructuredOutputManager._create_grammar", "speculation"),
        ("vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids", "speculation"),
        ("vllm.config.vllm:VllmConfig.compute_hash", "speculation"),
        ("vllm.v1.engine.core:EngineCoreProc._make_ready_response", "beam"),
        (f"{_SCHEDULER}._handle_blocked_waiting_request", "beam"),
    ],
)
def test_a_symbol_that_has_moved(fresh_process, monkeypatch, target, aside):
    """The other feature goes on; who asks for a method hears what is missing."""
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    module, _, path = target.partition(":")
    owner, _, name = path.partition(".")
    with monkeypatch.context() as patch:
        patch.delattr(getattr(importlib.import_module(module), owner), name)
        (message,) = fresh_process()
        assert f"({aside})" in message
        assert f"{target} is missing" in message
        other = {"speculation", "beam"} - {aside}
        assert [name for name, status in plugin.status().items() if status == "ok"] == [*other]
        if aside == "speculation":
            said = refusal()
            for words in ("'ngram_trie'", f"{target} is missing", "0.32.x", "leave the method out"):
                assert words in said
            with pytest.raises(RefusedError, match="has stepped aside"):
                from_command_line("--spec-method", "ngram_trie")


def test_where_even_the_symbol_that_refuses_is_gone(fresh_process, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(EngineArgs, "create_engine_config")
        messages = fresh_process()
    assert len(messages) == 2  # both features need it
    assert all("create_engine_config is missing" in message for message in messages)


def test_hooking_that_fails(fresh_process, monkeypatch):
    def fail(original: Any) -> None:
        raise RuntimeError("an unforeseen change")

    arguments = "vllm.engine.arg_utils:EngineArgs"
    works = Entry(f"{arguments}.from_cli_args", "wrapped", "a test", wrapper=lambda original: None)
    fails = Entry(f"{arguments}.create_model_config", "wrapped", "a test", wrapper=fail)
    monkeypatch.setattr(record, "ENTRIES", [works, fails])
    before = {**wrapped(), **vars(EngineArgs)}
    messages = fresh_process()
    assert {**wrapped(), **vars(EngineArgs)} == before
    assert "an unforeseen change" in messages[-1]
    assert plugin.status() == {"speculation": "RuntimeError: an unforeseen change", "beam": "ok"}


def test_the_ledger_fits_this_vllm():
    assert [f for f in ledger.check() if f.status != "ok"] == []
    for feature in ("speculation", "beam"):
        assert ledger.mismatch(feature) == ""


# -- whole processes ------------------------------------------------------------------------------

PROCESS = """
import os, sys
import vllm.plugins
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
TREES = {"method": "ngram_trie", "num_speculative_tokens": 8}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
SETTINGS = dict(
    model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128,
    kv_cache_memory_bytes=10 << 20, skip_tokenizer_init=True,
)
def refusal():
    try:
        LLM(**SETTINGS, speculative_config=TREES)
    except ValueError as error:
        return str(error)

# Without the plugin vLLM is as it was, and its own error answers who asks for a tree method.
assert "ngram_trie" in refusal()
assert "vllm_trie" not in sys.modules
for name in ("add_cli_args", "create_engine_config"):
    assert not hasattr(getattr(EngineArgs, name), "__wrapped__"), name

# With it, a symbol is gone.
del os.environ["VLLM_PLUGINS"]
vllm.plugins.plugins_loaded = False
from vllm_trie.hooks.ledger import Entry, record
runner = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
record.ENTRIES.append(Entry(f"{runner}._no_such_method", "called", "a test"))
assert "_no_such_method is missing" in refusal()
(output,) = LLM(**SETTINGS).generate(
    [{"prompt_token_ids": list(range(9, 30))}], PARAMS, use_tqdm=False
)
print("generated", len(output.outputs[0].token_ids))
"""


@pytest.mark.slow
def test_without_the_plugin_and_where_it_steps_aside():
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": ""}
    done = run_python("-c", PROCESS, str(model_path()), timeout=240, **variables)
    output = done.stdout + done.stderr
    # One message for the feature that needs the symbol, not one for each attempt.
    for words in ("steps aside", "_no_such_method is missing", "generated 12"):
        assert output.count(words) == 1, output[-4000:]


# -- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_differs_at_near_ties_only(engine, dtype):
    """A tree step rounds otherwise than a plain one; the first difference must be a close call."""
    params = SamplingParams(
        temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False, logprobs=2
    )
    some = prompts(12)
    expected = plain_outputs(engine(dtype=dtype), some, params)
    llm = engine(**speculation("test_oracle", 16), dtype=dtype)
    margin_of = margins(expected, generate(llm, some, params))
    assert all(margin is None or margin < 0.15 for margin in margin_of)
    assert margin_of.count(None) >= 6


# -- files that options name ----------------------------------------------------------------------


def test_options_do_not_change_the_hash_of_the_compiled_model(tmp_path):
    hashed = engine_config().compute_hash()
    options = {"trace_path": str(tmp_path), "node_budget": "fixed", "store_tokens": 0}
    vllm_config = engine_config(speculative_config={**TREES, **options})
    carried = dict(vllm_config.additional_config)
    assert vllm_config.compute_hash() == hashed
    assert vllm_config.additional_config == carried
    union = {"method": "trie_union", "drafters": ["ngram"], "num_speculative_tokens": 8}
    assert engine_config(speculative_config=union).compute_hash() == hashed
    # Other settings, and weights that take memory, still count.
    assert engine_config(additional_config={"other": 1}).compute_hash() != hashed
    medusa = {"method": "medusa_dynamic", "model": str(medusa_path())}
    assert engine_config(speculative_config=medusa).compute_hash() != hashed


@pytest.mark.slow
def test_a_refused_start_is_one_line():
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model_path())]
    options = {"method": "ngram_trie", "num_speculative_tokens": 1000}
    done = subprocess.run(
        [*command, "--speculative-config", json.dumps(options)],
        env=environment(spawns=True, OMP_NUM_THREADS="1"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr[-4000:]
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1] == (
        "vllm serve: error: num_speculative_tokens=1000 is the node limit of a request's draft "
        "tree and must be a whole number from 1 to 256; leave it out for 32"
    )


def test_heads_are_checked_before_anything_starts(tmp_path):
    medusa = {"method": "medusa_dynamic", "num_speculative_tokens": 8}
    assert "needs the Medusa heads" in refusal(speculative_config=medusa)
    heads = shutil.copytree(medusa_path(), tmp_path / "heads")
    asked = {**medusa, "model": str(heads)}
    assert config.read(engine_config(speculative_config=asked)).draft_model == str(heads)
    [file] = heads.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert f"{file} cannot be read" in refusal(speculative_config=asked)
