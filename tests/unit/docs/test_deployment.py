"""The files of examples/deploy: options, ports, probes and paths are those of the code."""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests.unit.docs.pages import ROOT, Page, all_pages

FOLDER = ROOT / "examples" / "deploy"


def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def manifest(kind: str) -> dict[str, Any]:
    documents = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    (document,) = [one for one in documents if one["kind"] == kind]
    return document


def unit() -> dict[str, list[str]]:
    """The settings of the systemd unit, each with its values."""
    settings: dict[str, list[str]] = {}
    for line in (FOLDER / "vllm-trie.service").read_text().splitlines():
        if match := re.match(r"(\w+)=(.*)", line):
            settings.setdefault(match[1], []).append(match[2])
    return settings


def server_arguments() -> dict[str, list[str]]:
    """What each file gives to `vllm serve`."""
    pod = manifest("Deployment")["spec"]["template"]["spec"]
    (start,) = unit()["ExecStart"]
    arguments = {
        "compose": load("compose.yaml")["services"]["server"]["command"],
        "kubernetes": pod["containers"][0]["args"],
        "systemd": shlex.split(start)[2:],
    }
    return {
        name: [word.replace("${MODEL}", "model") for word in words]
        for name, words in arguments.items()
    }


@pytest.fixture(scope="module")
def parser():
    """vLLM's own parser of `vllm serve`, with the plugin's additions."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    load_general_plugins()
    return make_arg_parser(FlexibleArgumentParser(exit_on_error=False))


def test_servers_start_and_end_and_keep_their_store(parser):
    """Options exist, a restart finds what was saved, and patience ends before the supervisor's."""
    from vllm_trie.drafts.engine.config import AllOptions

    (home,) = re.findall(r"^ENV HOME=(\S+)", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    (state,) = unit()["StateDirectory"]
    for name, arguments in server_arguments().items():
        parsed = parser.parse_args(arguments)
        assert (parsed.port, parsed.spec_method) == (8000, "ngram_trie"), name
        assert re.search(r"--shutdown-timeout[= ]60", " ".join(arguments)), name
        options = parsed.additional_config["vllm_trie"]
        AllOptions.model_validate(options)
        # A start makes the folder, and not its parents.
        kept = f"/var/lib/{state}" if name == "systemd" else home
        assert Path(options["store_path"]).parent == Path(kept), name
    pod = manifest("Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 90
    assert load("compose.yaml")["services"]["server"]["stop_grace_period"] == "90s"
    assert unit()["TimeoutStopSec"] == ["90"]


def serve_commands(document: Page) -> list[list[str]]:
    """Return the arguments of each `vllm serve` in a page's blocks of shell commands."""
    arguments, command = [], ""
    for line in "\n".join(document.fenced("bash")).replace("\\\n", " ").splitlines():
        command += line + "\n"
        try:
            words = shlex.split(command, comments=True)
        except ValueError:
            continue  # a quotation goes on in the next line
        command = ""
        if "serve" in words[:-1]:
            arguments.append(words[words.index("serve") + 1 :])
    return arguments


def test_every_page_starts_servers_with_options_that_exist(parser):
    pages = [page for page in all_pages() if not page.name.startswith("examples/")]
    commands = [words for page in pages for words in serve_commands(page)]
    assert len(commands) > 20
    for words in commands:
        parser.parse_args([word for word in words if word != "&"])


def test_probes_ask_what_a_server_answers():
    from vllm.entrypoints.serve.instrumentator.health import router

    paths = {route.path for route in router.routes}
    (container,) = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": 8000}]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["path"] in paths
        assert asked["port"] == "http"
    check = load("compose.yaml")["services"]["server"]["healthcheck"]["test"]
    assert check[-1].removeprefix("http://localhost:8000") in paths


def threads(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, set[int]]:
    """Return how many threads vLLM's executor gives to a worker, and the cores that they have."""
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    parallel = SimpleNamespace(
        local_world_size=1, data_parallel_rank_local=None, _api_process_count=1
    )
    config: Any = SimpleNamespace(parallel_config=parallel, kv_transfer_config=None)
    with monkeypatch.context() as patch:
        for name, value in environment.items():
            default = re.fullmatch(r"\$\{\w+:-(.*)\}", value)
            patch.setenv(name, value if default is None else default[1])
        manager = OMPProcessManager(config)
        with manager.configure_omp_envs(rank=0, local_rank=0):
            return int(os.environ["OMP_NUM_THREADS"]), {*chain(*manager.cpu_lists)}


def test_the_servers_of_a_machine_with_eight_cores_have_half_of_them_each(monkeypatch):
    for name in ("server", "replica"):
        environment = load("compose.yaml")["services"][name]["environment"]
        num_threads, cores = threads(environment, monkeypatch)
        assert 2 * (num_threads + 1) == 8  # with its front end
        assert not cores, "bound to those that the other one has as well"


def test_a_pod_has_as_many_threads_as_it_requests_cores_but_one(monkeypatch):
    (container,) = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    num_threads, cores = threads(environment, monkeypatch)
    assert num_threads == int(container["resources"]["requests"]["cpu"]) - 1
    assert not cores, "bound, whatever cores other pods of the node have"


def test_services_find_each_other():
    services = load("compose.yaml")["services"]
    (job,) = load("prometheus.yml")["scrape_configs"]
    for port, target in enumerate(job["static_configs"][0]["targets"], 8000):
        name, _, inside = target.partition(":")
        assert services[name]["ports"] == [f"127.0.0.1:{port}:{inside}"]
    options = json.loads(services["server"]["command"][2].partition("=")[2])["vllm_trie"]
    assert re.fullmatch(r"redis://(\w+):6379/0", options["store"])[1] in services
    (source,) = load("grafana.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert services["prometheus"]["ports"][0].endswith(":9090")
    # The dashboard's folder is where Grafana looks for it.
    mounts = dict(mount.split(":")[:2] for mount in services["grafana"]["volumes"])
    (provider,) = load("grafana-dashboards.yml")["providers"]
    (shared,) = [at for at, to in mounts.items() if to == provider["options"]["path"]]
    (dashboard,) = (FOLDER / shared).glob("*.json")
    assert json.loads(dashboard.read_text())["panels"]
    for service in services.values():
        for mount in service.get("volumes", ()):
            if mount.startswith("."):
                assert (FOLDER / mount.split(":")[0]).exists(), mount


def test_a_deployment_keeps_its_volume():
    pod = manifest("Deployment")["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    dockerfile = (FOLDER / "Dockerfile").read_text()
    (home,) = re.findall(r"^ENV HOME=(\S+)", dockerfile, re.MULTILINE)
    claim = mounts[home]["persistentVolumeClaim"]["claimName"]
    assert claim == manifest("PersistentVolumeClaim")["metadata"]["name"]
    assert f"vllm:{home}" in load("compose.yaml")["services"]["server"]["volumes"]
    labels = pod["metadata"]["labels"]
    assert manifest("Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert manifest("Service")["spec"]["selector"] == labels
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == "8000"


def test_the_image_is_of_the_supported_vllm():
    text = (FOLDER / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = map(Requirement, project["optional-dependencies"]["cpu"])
    (version,) = [specifier.version for specifier in needed.specifier]
    assert set(re.findall(r"TAG=v([\d.]+)", text)) == {version}
    assert 'ENTRYPOINT ["vllm", "serve"]' in text
