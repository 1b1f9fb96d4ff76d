"""The hosts themselves: apart from each other and from the machine, and gone with the test."""

import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from disagg.cluster.processes import is_alive
from tests.hosts import hosts as module
from tests.hosts.hosts import MAIN, Host, Hosts, find_reason_unavailable
from tests.hosts.namespaces import Namespaces, UnavailableError

WAIT_S = 60.0
SSH = "ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new"


def wait_for(state: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not state():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def reaches(one: Host, other: Host) -> bool:
    probe = f"timeout 2 bash -c 'read -r banner < /dev/tcp/{other.address}/22'"
    return one.run(probe, check=False).returncode == 0


def machine_links() -> str:
    names = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
    return names.stdout


def test_each_has_names_processes_and_files_of_its_own(three_hosts: Hosts) -> None:
    first, second, third = three_hosts
    assert [host.run("hostname").stdout for host in three_hosts] == ["h1\n", "h2\n", "h3\n"]
    first.run("echo mine > /tmp/disagg-here; echo mine > here; echo mine > /dev/shm/here")
    kept = "cat /tmp/disagg-here here /dev/shm/here"
    assert first.run(kept).stdout.split() == ["mine"] * 3
    assert second.run(kept, check=False).stdout == ""
    assert not Path("/tmp/disagg-here").exists()
    denied = third.run("touch /etc/disagg-here", check=False)
    assert "Read-only file system" in denied.stderr

    with first.popen("exec -a disagg-marked sleep 600") as marked:
        wait_for(lambda: "disagg-marked" in first.run("ps -e -o args").stdout, "not started")
        assert "disagg-marked" not in second.run("ps -e -o args").stdout
        marked.kill()
    wait_for(lambda: "disagg-marked" not in first.run("ps -e -o args").stdout, "not ended")


def test_all_log_into_all_and_nobody_without_the_key(three_hosts: Hosts) -> None:
    for host in three_hosts:
        for other in three_hosts:
            assert host.run(f"{SSH} {other.name} hostname").stdout == f"{other.name}\n"
            assert host.run(f"{SSH} {other.address} hostname").stdout == f"{other.name}\n"
    host.run("ssh-keygen -q -t ed25519 -N '' -f /tmp/stranger")
    refused = host.run(f"{SSH} -o IdentitiesOnly=yes -i /tmp/stranger h1 hostname", check=False)
    assert refused.returncode == 255
    assert "Permission denied" in refused.stderr


def test_orphans_are_reaped(three_hosts: Hosts) -> None:
    host = three_hosts[0]
    host.run("(sleep 0.01 &)")
    wait_for(lambda: "Z" not in host.run("ps -e -o stat=").stdout, "the first process reaps none")
    assert len(host.processes) == 2  # the first and sshd


def test_a_cut_link_loses_everything_and_a_healed_one_nothing(three_hosts: Hosts) -> None:
    first, second, third = three_hosts
    pairs = [(one, other) for one in three_hosts for other in three_hosts]
    assert all(reaches(one, other) for one, other in pairs)

    three_hosts.cut(first, second)
    cut = {(first, second), (second, first)}
    assert {(one, other) for one, other in pairs if not reaches(one, other)} == cut

    three_hosts.cut(second, third)
    three_hosts.heal(first, second)
    cut = {(third, second), (second, third)}
    assert {(one, other) for one, other in pairs if not reaches(one, other)} == cut

    three_hosts.heal(*three_hosts)
    assert all(reaches(one, other) for one, other in pairs)


def test_who_talks_while_the_link_is_cut_is_told_nothing(three_hosts: Hosts) -> None:
    first, second, _ = three_hosts
    first.run("rm -f /tmp/words /tmp/answers; mkfifo /tmp/words; touch /tmp/answers")
    line = f"exec {SSH} h2 'while read -r word; do echo answer $word; done' <> /tmp/words"

    def answers() -> list[str]:
        return first.run("cat /tmp/answers").stdout.split("\n")[:-1]

    with first.popen(f"{line} > /tmp/answers") as talk:
        first.run("echo one > /tmp/words")
        wait_for(lambda: answers() == ["answer one"], "no answer over a whole link")
        three_hosts.cut(first, second)
        first.run("echo two > /tmp/words")
        assert not reaches(first, second)  # seconds in which no answer came
        assert answers() == ["answer one"]
        assert talk.poll() is None
        three_hosts.heal(first, second)
        wait_for(lambda: answers() == ["answer one", "answer two"], "what was lost is not resent")
        talk.kill()


def test_a_slow_link_is_slow(three_hosts: Hosts) -> None:
    first, second, _ = three_hosts
    first.run(f"{SSH} h2 true")

    def took_s() -> float:
        begun = time.monotonic()
        first.run(f"head -c 1000000 /dev/urandom | {SSH} -o Compression=no h2 'wc -c'")
        return time.monotonic() - begun

    quick = took_s()
    three_hosts.slow(second, megabits=2)
    slow = took_s()
    three_hosts.hasten(second)
    assert slow > 3.0  # 8 million bits, 2 million a second; a part may be on its way
    assert quick < slow
    assert took_s() < slow


def test_a_paused_host_stands_still_and_goes_on(three_hosts: Hosts) -> None:
    first, second, _ = three_hosts
    second.run("nohup bash -c 'while sleep 0.01; do echo >> /tmp/steps; done' > /dev/null 2>&1 &")

    def num_steps() -> int:
        return len((Path(f"/proc/{second.space.pid}/root/tmp/steps")).read_text())

    wait_for(lambda: Path(f"/proc/{second.space.pid}/root/tmp/steps").exists(), "no step")
    second.pause()
    before = num_steps()
    assert not reaches(first, second)  # its sshd says nothing
    assert num_steps() == before
    second.resume()
    wait_for(lambda: num_steps() > before, "does not go on")
    assert reaches(first, second)


def test_a_killed_host_is_gone_and_comes_back_empty(three_hosts: Hosts) -> None:
    first, second, third = three_hosts
    second.run("trap '' TERM HUP; setsid nohup sleep 600 > /dev/null 2>&1 & touch /tmp/here")
    on_second, on_first = second.processes, first.processes
    assert len(on_second) >= 3
    second.kill()
    assert not any(is_alive(process) for process in on_second)
    assert all(is_alive(process) for process in on_first)
    assert not reaches(first, second)
    assert reaches(first, third)
    with pytest.raises(RuntimeError, match="h2 does not run"):
        second.run("true")

    three_hosts.restart(second)
    wait_for(lambda: reaches(first, second), "not back")
    assert "here" not in second.run("ls /tmp").stdout.split()  # the repository may lie there
    assert (
        first.run(f"{SSH} -o StrictHostKeyChecking=yes h2 hostname", check=False).stdout == "h2\n"
    )


def test_nothing_reaches_the_machine_or_what_is_beyond(three_hosts: Hosts) -> None:
    before = machine_links()
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        own = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False)
        addresses = ["127.0.0.1", *(each for each in own.stdout.split() if "." in each)]
        for address in addresses:
            socket.create_connection((address, port), 5).close()  # it does listen
            probe = f"timeout 5 bash -c 'echo > /dev/tcp/{address}/{port}'"
            assert three_hosts[0].run(probe, check=False).returncode != 0
    beyond = three_hosts[0].run("echo > /dev/tcp/192.0.2.1/80", check=False)
    assert "No route to host" in beyond.stderr  # at once: nothing waits for a time-out
    assert machine_links() == before  # and the machine has no way to the hosts either


def test_a_line_that_fails_or_lasts_is_seen(three_hosts: Hosts) -> None:
    with pytest.raises(AssertionError, match="exit code 3: some words"):
        three_hosts[0].run("echo some words; exit 3")
    with pytest.raises(AssertionError, match="not done in"):
        three_hosts[0].run("sleep 600", bound_s=0.2)
    wait_for(lambda: len(three_hosts[0].processes) == 2, "the line goes on")


def test_what_cannot_be_made_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_reason_unavailable() == ""
    with monkeypatch.context() as patched:
        patched.setattr(module, "TOOLS", ("ip", "no-such-tool"))
        assert find_reason_unavailable().startswith("hosts need no-such-tool")
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 1000)
        assert find_reason_unavailable() == "hosts need Linux and root"
    with pytest.raises(UnavailableError, match="cannot stat '/no/such"):
        Namespaces(["bash", str(MAIN), "h1", "/no/such/folder"])
