"""Load the C++ cores with ctypes: a wheel's own, or what is compiled on first use.

A wheel for x86-64 has compiled cores. Anywhere else, in a checkout above all, each core is compiled
where it runs: once per user, source, compiler and CPU. Every caller has a readable Python twin to
fall back on, so a machine with neither loses speed and nothing else.
"""

from __future__ import annotations

import _ctypes
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from vllm_trie.native.prebuilt import find_prebuilt

logger = logging.getLogger(__name__)

DEFAULT_FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off")
"""Contraction is off so that a multiply-add rounds as its Python twin does."""

SHARED_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.hpp")))
"""Vectors of floats and parallel regions, for the sources of any library."""

_COMPILE_SECONDS = 300


class NativeBuildError(RuntimeError):
    """A library could not be built or loaded; the message says why."""


def load_library(
    name: str,
    sources: Sequence[Path],
    flags: Sequence[str] = DEFAULT_FLAGS,
    headers: Sequence[Path] = (),
    functions: Iterable[str] = (),
) -> ctypes.CDLL | None:
    """Load the wheel's own library, or compile `sources` if needed and load the result.

    A library that cannot be loaded, or that lacks a function, is compiled once more.

    Args:
        name: Of the library, for the file and the log.
        sources: C++ files to compile together; they export C functions.
        flags: Compiler flags in addition to `-shared -fPIC`.
        headers: Files that the sources include; a change in one rebuilds the library.
        functions: Names of functions that it must export.

    Returns:
        The library, or None if there is none; the reason is then logged, once per name. Setting
        the environment variable `VLLM_TRIE_NATIVE` to 0 switches all native code off.

    Safe in concurrent processes: one compiles, the others wait for it.
    """
    if os.environ.get("VLLM_TRIE_NATIVE") == "0":
        _log_once(name, "VLLM_TRIE_NATIVE=0")
        return None
    if prebuilt := find_prebuilt(name):
        try:
            return _open(prebuilt, functions)
        except (OSError, AttributeError) as error:  # damaged, or for a newer C library
            logger.warning("cannot load %s: %s", prebuilt, error)
    try:
        path = build_library(name, sources, flags, headers)
        try:
            return _open(path, functions)
        except (OSError, AttributeError):
            # Made for another C library, or forged: compile it again.
            path = build_library(name, sources, flags, headers, rebuild=True)
            return _open(path, functions)
    except (NativeBuildError, OSError, AttributeError) as error:
        _log_once(name, str(error))
        return None


def _open(path: Path, functions: Iterable[str]) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    try:
        for function in functions:
            getattr(library, function)
    except AttributeError:
        _ctypes.dlclose(library._handle)  # the same path would give the same library again
        raise
    return library


def build_library(
    name: str,
    sources: Sequence[Path],
    flags: Sequence[str] = DEFAULT_FLAGS,
    headers: Sequence[Path] = (),
    rebuild: bool = False,
) -> Path:
    """Return the path of the library, compiled now if it is not cached or `rebuild` is set.

    A cached library that does not match its digest is compiled again: a damaged one would
    end the process with a signal, without a message, when it is loaded or called.

    Raises:
        NativeBuildError: No compiler, or it failed (its message is included).
    """
    compiler = find_compiler()
    digest = _digest(compiler, [*sources, *headers], flags)
    folder = cache_folder()
    library = folder / f"{name}-{digest}.so"
    if not rebuild and is_whole(library):
        return library
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        if rebuild or not is_whole(library):  # another process may have compiled it meanwhile
            if library.exists():
                logger.warning("%s does not match its digest, and is compiled again", library)
            _compile(compiler, sources, flags, library)
    return library


def is_whole(library: Path) -> bool:
    """Return whether a library is there and its content is what the compiler wrote under its name.

    This shows damage. It is no protection from whoever may write to the user's cache folder.
    """
    try:
        return _digest_file(library).read_text() == _content_digest(library, library.name)
    except (OSError, UnicodeDecodeError):
        return False


def damaged_libraries() -> list[Path]:
    """Return the libraries in the cache folder that do not match their digests.

    Raises:
        NativeBuildError: There is no folder that can be used.
    """
    damaged = sorted(cache_folder().glob("*.so"))
    return [
        library for library in damaged if _digest_file(library).exists() and not is_whole(library)
    ]


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _content_digest(file: Path, name: str) -> str:
    """Return a digest of a name and a content: a library under another's name has the wrong one."""
    return hashlib.sha256(name.encode() + b"\0" + file.read_bytes()).hexdigest()


def cache_folder() -> Path:
    """Return the folder of compiled libraries, created if missing and readable by the user alone.

    `VLLM_TRIE_CACHE_DIR` if set, else `vllm_trie` below `XDG_CACHE_HOME` or `~/.cache`, else, where
    none of these can be written, a folder in the system's temporary directory.
    """
    candidates = []
    if os.environ.get("VLLM_TRIE_CACHE_DIR"):
        candidates.append(Path(os.environ["VLLM_TRIE_CACHE_DIR"]))
    else:
        if os.environ.get("XDG_CACHE_HOME"):
            candidates.append(Path(os.environ["XDG_CACHE_HOME"]) / "vllm_trie")
        with suppress(RuntimeError):  # a user without a home, as in some containers
            candidates.append(Path.home() / ".cache" / "vllm_trie")
        candidates.append(Path(tempfile.gettempdir()) / f"vllm_trie-{os.getuid()}")
    for folder in candidates:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        # Loading code from a folder that another user owns would run that user's code.
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            return folder
    tried = ", ".join(map(str, candidates))
    raise NativeBuildError(
        f"no folder to keep compiled code in (tried {tried}); set VLLM_TRIE_CACHE_DIR to a folder "
        "that you own"
    )


def find_compiler() -> tuple[str, ...]:
    """Return the command of the C++ compiler: `CXX`, which may have arguments, or the first found.

    Links are not followed: `g++` may be one to ccache, and clang goes by the name it is called.

    Raises:
        NativeBuildError: There is none.
    """
    chosen = os.environ.get("CXX")
    if chosen:
        with suppress(ValueError):  # an unbalanced quotation mark
            program, *arguments = shlex.split(chosen) or [""]
            if command := shutil.which(program):
                return (os.path.abspath(command), *arguments)
        raise NativeBuildError(f"CXX={chosen!r} is not a program")
    for candidate in ("g++", "clang++", "c++"):
        if command := shutil.which(candidate):
            return (os.path.abspath(command),)
    raise NativeBuildError("no C++ compiler (g++, clang++ or c++) on PATH")


def _digest(compiler: Sequence[str], files: Sequence[Path], flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    status = os.stat(compiler[0])
    for part in (*compiler, status.st_size, status.st_mtime_ns, *flags, _cpu_description()):
        digest.update(f"{part}\0".encode())
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:24]


@functools.cache
def _cpu_description() -> str:
    """Return what `-march=native` depends on: unlike machines may share a home folder."""
    fields = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = [platform.processor()]
    return "\n".join(
        [platform.machine(), *(line for line in lines if line.split("\t")[0].strip() in fields)]
    )


def _compile(
    compiler: Sequence[str], sources: Sequence[Path], flags: Sequence[str], library: Path
) -> None:
    logger.info(
        "compiling %s with %s; this takes some seconds, once", library.name, Path(compiler[0]).name
    )
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    command = [*compiler, *flags, "-shared", "-fPIC", *map(str, sources), "-o", temporary]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False
        )
        if result.returncode != 0:
            raise NativeBuildError(f"{' '.join(command)} failed: {result.stderr.strip()[-2000:]}")
        digest = _content_digest(Path(temporary), library.name)
        os.replace(temporary, library)
        # A process that is killed between the two leaves a library to compile again.
        _digest_file(library).write_text(digest)
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(
            f"{' '.join(compiler)} took more than {_COMPILE_SECONDS} s"
        ) from error
    finally:
        Path(temporary).unlink(missing_ok=True)


@functools.cache
def _log_once(name: str, reason: str) -> None:
    logger.warning("no native %s, using the slower Python version: %s", name, reason)
