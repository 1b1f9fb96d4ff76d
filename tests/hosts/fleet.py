"""`ray up cluster.yaml` as shipped, from a laptop onto hosts, with the edits it asks for."""

import contextlib
import json
import re
import shlex
import subprocess
import sysconfig
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.hosts.hosts import ROOT, Host

BOUND_S = 400.0
POLL_S = 0.5
ENVIRONMENT = "disagg-env"
COMPLETE = re.compile(r": all workers serve$", re.MULTILINE)
SERVES = re.compile(
    r": worker (\S+) serves(?: again)? on ([\d.]+):\d+ \(pid \d+, epoch (\w+)\)$", re.MULTILINE
)
OURS = re.compile(r"ray|disagg (serve|router|workers)|disagg\.commands")
SEND = f"~/{ENVIRONMENT}/bin/python -c " + shlex.quote(
    "import httpx, json, sys\n"
    "url, body, headers = sys.argv[1:]\n"
    "with httpx.Client(headers=json.loads(headers), timeout=300, trust_env=False) as client:\n"
    "    got = client.post(url, content=body) if body else client.get(url)\n"
    "    print(got.status_code, got.text)\n"
)
"""Sends a request: url, body, headers."""
SEND_ON = f"~/{ENVIRONMENT}/bin/python -c " + shlex.quote(
    "import httpx, pathlib, sys\n"
    "url, body, key, end = sys.argv[1:]\n"
    "headers = {'Authorization': 'Bearer ' + key, 'Content-Type': 'application/json'}\n"
    "with httpx.Client(headers=headers, timeout=300, trust_env=False) as client:\n"
    "    while not pathlib.Path(end).exists():\n"
    "        got = client.post(url, content=body)\n"
    "        print(got.status_code, got.text, flush=True)\n"
)
"""Sends one request after the other, each once, until a file is there."""
COMMANDS = {"disagg": "disagg.commands.__main__:main", "ray": "ray.scripts.scripts:main"}


def make_environment(folder: Path) -> Path:
    """A Python environment as users install one, with what runs this test inside."""
    made = folder / ENVIRONMENT
    venv.create(made, symlinks=True)
    (packages,) = made.glob("lib/python*/site-packages")
    paths = [str(ROOT), sysconfig.get_path("purelib")]
    (packages / "disagg.pth").write_text("\n".join([*paths, ""]))
    for name, entry in COMMANDS.items():
        module, _, function = entry.partition(":")
        script = made / "bin" / name
        script.write_text(
            f"#!{made}/bin/python\nimport sys\nfrom {module} import {function}\n"
            f"sys.exit({function}())\n"
        )
        script.chmod(0o755)
    return made


class Fleet:
    """A laptop and the hosts of a cluster, the first of which is the head.

    Attributes:
        key: of a client.
        model_dir: what is served.
    """

    def __init__(
        self, laptop: Host, hosts: Sequence[Host], environment: Path, model_dir: Path
    ) -> None:
        self.laptop = laptop
        self.hosts = list(hosts)
        self.head = self.hosts[0]
        self._environment = environment
        self.model_dir = model_dir
        self.key = ""

    def prepare(self) -> None:
        """Do what the head of cluster.yaml says, on the laptop and on every host."""
        for host in (self.laptop, *self.hosts):
            host.run(f"ln -s {self._environment} ~/{ENVIRONMENT}")
        addresses = [host.address for host in self.hosts]
        cluster = (ROOT / "cluster.yaml").read_text()
        cluster = _edit(cluster, "head_ip: 192.0.2.10", f"head_ip: {addresses[0]}")
        workers = ", ".join(addresses[1:])
        cluster = _edit(cluster, "[192.0.2.11, 192.0.2.12]", f"[{workers}]")
        cluster = _edit(cluster, "ssh_user: ubuntu", "ssh_user: root")
        settings = (ROOT / "disagg.yaml").read_text()
        settings = _edit(settings, "192.0.2.10:", f"{addresses[0]}:")
        settings = _edit(settings, "num_hosts: 3", f"num_hosts: {len(addresses)}")
        settings = _edit(settings, "/models/my-model", str(self.model_dir))
        # The tiny model's own sizes: hosts of a test share the memory of one machine.
        settings = _edit(settings, "worker:\n", "worker:\n  num_blocks: 256\n")
        self.write("cluster.yaml", cluster)
        self.write("disagg.yaml", settings)
        self.do("ray get-auth-token --generate")
        self.do("disagg keys create-hash-key disagg-hash-key")
        said = self.do("disagg keys create --file disagg-keys.json --tenant my-team --name laptop")
        self.key = said.split()[-1]
        self.do("disagg certificates create --directory certificates")

    def write(self, name: str, text: str) -> None:
        """A file in the laptop's home."""
        self.laptop.run(f"cat > {name} <<'END_OF_FILE'\n{text}\nEND_OF_FILE")

    def do(self, command: str, *, bound_s: float = BOUND_S) -> str:
        """Run a command on the laptop, with the environment's commands in its path."""
        done = self.laptop.run(f"PATH=~/{ENVIRONMENT}/bin:$PATH; {command}", bound_s=bound_s)
        return done.stdout

    def up(self) -> None:
        """Run `ray up`."""
        self.do("ray up cluster.yaml -y > up.log 2>&1 || { cat up.log; exit 1; }")

    def edit_settings(self, old: str, new: str) -> None:
        """Change the laptop's disagg.yaml."""
        text = self.laptop.run("cat disagg.yaml").stdout
        self.write("disagg.yaml", _edit(text, old, new))

    def ask(self, body: dict[str, Any], *, request_id: str = "", key: str = "") -> tuple[int, Any]:
        """Complete a prompt, asked from the laptop; status and answer, or 0 and why not."""
        with self.ask_in_background(body, request_id, key) as asking:
            said, complained = asking.communicate(timeout=BOUND_S)
        return self.read(said) if asking.returncode == 0 else (0, complained[-300:])

    def ask_in_background(
        self, body: dict[str, Any], request_id: str = "", key: str = ""
    ) -> "subprocess.Popen[str]":
        """Begin to; what it says is for `read`."""
        url = f"http://{self.head.address}:8000/v1/completions"
        given = {"model": "my-model", "temperature": 0, "ignore_eos": True} | body
        return self._send(self.laptop, url, json.dumps(given), request_id, key)

    def read(self, said: str) -> tuple[int, Any]:
        """Status and answer."""
        status, _, text = said.partition(" ")
        return int(status), json.loads(text) if text.startswith("{") else text

    def record(self, request_id: str) -> dict[str, Any]:
        """What the router did for a request, from its page for operators; empty: unknown."""
        url = f"http://127.0.0.1:8001/v1/disagg/requests/{request_id}"
        with self._send(self.head, url, "", "", "") as asking:
            said, _ = asking.communicate(timeout=BOUND_S)
        status, answer = self.read(said) if asking.returncode == 0 else (0, {})
        return dict(answer) if status == 200 else {}

    def _send(
        self, host: Host, url: str, body: str, request_id: str, key: str
    ) -> "subprocess.Popen[str]":
        headers = {"Authorization": f"Bearer {key or self.key}", "X-Request-Id": request_id}
        said = {name: value for name, value in headers.items() if value}
        words = (url, body, json.dumps(said | {"Content-Type": "application/json"}))
        return host.popen(f"{SEND} {shlex.join(words)}")

    def log(self) -> str:
        """What the head's `disagg` said since it was started."""
        return self.head.run("cat disagg.log", check=False).stdout

    def num_complete(self) -> int:
        """How often all workers have come to serve."""
        return len(COMPLETE.findall(self.log()))

    def wait_until_complete(self, before: int = 0) -> None:
        """Wait until all workers have come to serve more often than so."""
        wait_for(lambda: self.num_complete() > before, self.log)

    def places(self) -> dict[str, str]:
        """Address of the host of every worker that has served, by its id."""
        return {found[1]: found[2] for found in SERVES.finditer(self.log())}

    def epochs(self) -> dict[str, str]:
        """Last life of every worker that has served, by its id."""
        return {found[1]: found[3] for found in SERVES.finditer(self.log())}

    def pids(self, pattern: str) -> list[list[str]]:
        """Per host the processes whose command line matches."""
        found = [host.run(f"pgrep -f {shlex.quote(pattern)}", check=False) for host in self.hosts]
        return [each.stdout.split() for each in found]

    @contextlib.contextmanager
    def load(self, body: dict[str, Any]) -> Iterator[list[tuple[int, Any]]]:
        """One request after the other from the laptop; afterwards the list has all answers."""
        url = f"http://{self.head.address}:8000/v1/completions"
        given = {"model": "my-model", "temperature": 0, "ignore_eos": True} | body
        self.laptop.run("rm -f end-of-load answers")
        words = shlex.join((url, json.dumps(given), self.key, "end-of-load"))
        answers: list[tuple[int, Any]] = []
        with self.laptop.popen(f"{SEND_ON} {words} > answers") as sending:
            answered = "test -s answers"
            wait_for(
                lambda: self.laptop.run(answered, check=False).returncode == 0, lambda: "no answer"
            )
            yield answers
            self.laptop.run("touch end-of-load")
            _, complained = sending.communicate(timeout=BOUND_S)
        assert sending.returncode == 0, complained
        answers += [self.read(line) for line in self.laptop.run("cat answers").stdout.splitlines()]

    def left(self) -> list[str]:
        """What runs on the hosts besides what they began with."""
        found = []
        for host in self.hosts:
            running = host.run("ps -e -o pid=,sid=,args=").stdout.splitlines()
            found += [f"{host.name}: {line}" for line in running if OURS.search(line)]
        return found


def wait_for(state: Callable[[], Any], fail: Callable[[], str], bound_s: float = BOUND_S) -> Any:
    """Wait until the state is true; return it."""
    deadline = time.monotonic() + bound_s
    while not (found := state()):
        assert time.monotonic() < deadline, fail()
        time.sleep(POLL_S)
    return found


def _edit(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"{old}: {text.count(old)} times in the file"
    return text.replace(old, new)
