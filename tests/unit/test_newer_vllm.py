"""Another release of vLLM over the installed one."""

import importlib.util
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "packaging" / "newer_vllm.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("newer_vllm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "vllm-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "version = 9\n")
        archive.writestr("vllm/v1/core.py", "")
        archive.writestr("vllm/_C.abi3.so", "for GPUs")
        archive.writestr("vllm-9.9.9.dist-info/METADATA", "")
        archive.writestr("other/__init__.py", "")
    return path


def test_python_of_one_and_compiled_files_of_the_other(script, wheel, tmp_path):
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "_C.abi3.so").write_text("for CPUs")
    (installed / "__init__.py").write_text("version = 8\n")
    folder = tmp_path / "new" / "folder"
    assert script.lay_over(wheel, installed, folder) == (2, 1)
    paths = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert paths == {"vllm/__init__.py", "vllm/v1/core.py", "vllm/_C.abi3.so"}
    assert (folder / "vllm" / "__init__.py").read_text() == "version = 9\n"
    assert (folder / "vllm" / "_C.abi3.so").read_text() == "for CPUs"
    with pytest.raises(SystemExit, match="exists"):
        script.lay_over(wheel, installed, folder)
