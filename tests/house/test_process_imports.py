"""What a process need not import costs it seconds and memory at every start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPUTING = ("torch", "transformers", "safetensors", "nixl", "vllm", "ray", "sympy")
"""Packages of those who compute, move KV, or start processes."""
PROCESSES = {
    "disagg.router.process": (*COMPUTING, "zmq"),
    "disagg.commands.main": (*COMPUTING, "uvicorn", "numpy"),
    "disagg.config": (*COMPUTING, "grpc", "uvicorn", "numpy"),
    "disagg.workers.actor": ("torch", "transformers", "nixl", "vllm", "ray"),
    "disagg.workers.worker": ("vllm", "ray", "sympy", "transformers.modeling_utils"),
}
"""By the module that is imported first; Ray imports the actor's wherever it names one."""


def imported(module: str, packages: tuple[str, ...], path: Path = ROOT) -> list[str]:
    """Which of the packages a new interpreter has imported after a module."""
    program = (
        f"import json, sys; sys.path[:0] = {[str(path), str(ROOT)]!r}; import {module}; "
        f"print(json.dumps([name for name in {packages!r} if sys.modules.get(name)]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    found: list[str] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize(("module", "absent"), PROCESSES.items())
def test_a_process_imports_what_it_needs(module: str, absent: tuple[str, ...]) -> None:
    assert imported(module, absent) == []


@pytest.mark.parametrize("name", COMPUTING)
def test_every_package_would_be_seen(name: str, tmp_path: Path) -> None:
    """Negative control: an import deep inside a module that is imported."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "planted.py").write_text("import planted_below\n")
    (tmp_path / "planted_below.py").write_text(f"from {name} import __doc__\n")
    assert imported("planted", COMPUTING, tmp_path) == [name]


def without_vllm(names: list[str]) -> subprocess.CompletedProcess[str]:
    program = "import importlib, sys; sys.modules['vllm'] = None; "
    program += f"[importlib.import_module(name) for name in {names!r}]"
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)


def test_tests_of_vllm_are_collected_without_it() -> None:
    """Both environments collect every test; an import of vLLM would end the run that lacks it."""
    names = [f"tests.vllm.{path.stem}" for path in sorted((ROOT / "tests/vllm").glob("*.py"))]
    assert "tests.vllm.conftest" in names
    ended = without_vllm(names)
    assert ended.returncode == 0, ended.stderr
    assert without_vllm(["disagg.workers.engines.vllm.shared_memory"]).returncode == 1  # control
