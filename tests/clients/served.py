"""What the clients are pointed at: `disagg serve` with keys, one prefill and one decode worker."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.checkpoints import make_checkpoint
from tests.process.program import ROOT, Program

MODEL = "tiny"
WINDOW = 32
TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}{{ tools | map(attribute='function') | list | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
)
SETTINGS = {
    "router.admin_port": 0,
    "worker.device": "cpu",
    "scheduling.max_sequences": 16,
    "transfer.reserve_timeout_ms": 30_000,  # a slow machine is no refusal
    "router.drain_timeout_ms": 1_000,
}
ANSWER_S = 300.0


@dataclass(frozen=True)
class Served:
    """Where it serves, and with which key."""

    program: Program
    checkpoint: Path
    url: str
    admin_url: str
    key: str
    admin_key: str

    def post(self, path: str, **body: Any) -> Any:
        """Our own request, without a client's library; the answer's JSON."""
        answer = httpx.post(
            f"{self.url}{path}",
            json={"model": MODEL} | body,
            headers={"Authorization": f"Bearer {self.key}"},
            timeout=ANSWER_S,
        )
        answer.raise_for_status()
        return answer.json()

    def complete(self, prompt: object, max_tokens: int, **more: Any) -> Any:
        """A greedy completion; the first choice."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | more
        return self.post("/v1/completions", **body)["choices"][0]

    def num_handed_over(self) -> int:
        """Hand-overs that were committed so far."""
        answer = httpx.get(
            f"{self.admin_url}/v1/disagg/workers",
            headers={"Authorization": f"Bearer {self.admin_key}"},
            timeout=ANSWER_S,
        )
        answer.raise_for_status()
        workers = answer.json()["workers"]
        return sum(one["stats"]["counters"].get("transfers_committed", 0) for one in workers)


def create_key(folder: Path, name: str, *scopes: str) -> str:
    """A key of the tenant ``clients``, by the command that makes them."""
    given = [part for scope in scopes for part in ("--scope", scope)]
    command = [sys.executable, "-m", "disagg.commands", "keys", "create", "--file", "keys.json"]
    done = subprocess.run(
        [*command, "--tenant", "clients", "--name", name, *given],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.split()[-1]


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """A tiny checkpoint with a tokenizer and a chat template, served until the end."""
    checkpoint = make_checkpoint(folder / MODEL, "gemma3", window=WINDOW)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    key = create_key(folder, "client", "serve")
    admin_key = create_key(folder, "operator", "observe", "admin")
    settings = SETTINGS | {"router.api_keys_file": folder / "keys.json"}
    given = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    ports = ["--http-port", "0", "--grpc-port", "0"]
    program = Program(
        "disagg.commands", "serve", "--model", str(checkpoint), *ports, *given, cwd=folder
    )
    try:
        admin_url = program.wait_for(r"^metrics and records are on (http://[\d.]+:\d+)$")[1]
        url = program.wait_for(r"^serving tiny on (http://[\d.]+:\d+)/v1 ")[1]
        yield Served(program, checkpoint, url, admin_url, key, admin_key)
    finally:
        program.end()
