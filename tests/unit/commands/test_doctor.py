"""What `disagg doctor` says of machines, settings and fleets, well and ill."""

import os
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from disagg.commands.doctor import config_of, draw
from disagg.commands.finding import Finding, Level, has_fault
from disagg.commands.fleet_findings import judge_fleet, look_at_router
from disagg.commands.machine_findings import (
    look_at_files,
    look_at_nixl,
    look_at_packages,
    look_at_python,
    look_at_rdma,
    look_at_shared_memory,
)
from disagg.commands.setup_findings import (
    look_at_certificate,
    look_at_checkpoint,
    look_at_port,
    look_at_ray,
    look_at_secrets,
)
from disagg.commands.transfer_findings import ROUNDS_MAX, Ports, measure_pairs, measured, pairs_of
from disagg.config import Settings
from disagg.telemetry.open_files import UNLIMITED
from disagg.tls.authority import create_certificates
from tests.checkpoints import make_checkpoint, make_no_file

GROUP = {"group": 0, "kind": "full_attention", "pulled_bytes": 2_000_000}


def levels(findings: Any) -> list[tuple[Level, str]]:
    return [(one.level, one.subject) for one in findings]


def test_whatever_is_wrong_comes_with_what_to_do() -> None:
    with pytest.raises(AssertionError):
        Finding(Level.FAULT, "x", "broken")
    assert Finding(Level.OK, "x", "well").advice == ""


def test_python_and_packages() -> None:
    assert look_at_python((3, 11, 2)).level is Level.OK
    assert look_at_python((3, 10, 9)).level is Level.FAULT
    missing, old, summary = look_at_packages(["nobody-has-this", "rich<1", "typer>=0.1"])
    assert (missing.level, missing.subject) == (Level.FAULT, "nobody-has-this")
    assert old.advice == "pip install 'rich<1'"
    assert summary.seen.startswith("1 as needed")
    assert not has_fault(look_at_packages())


def test_a_crash_of_nixl_is_a_finding_and_no_crash_of_ours() -> None:
    crash = look_at_nixl(("-c", "import os; os.abort()"))
    assert crash.level is Level.FAULT
    assert "exit code" in crash.seen
    said = look_at_nixl(("-c", "import sys; sys.exit('no transport')"))
    assert "a READ failed" in said.seen
    assert "no transport" in said.seen
    assert look_at_nixl().level is Level.OK


def test_rdma_ports_and_memory(tmp_path: Path) -> None:
    assert levels(look_at_rdma(tmp_path / "none", 65536)) == [(Level.NOTE, "rdma")]
    for name, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    found = list(look_at_rdma(tmp_path, 65536))
    assert [one.level for one in found] == [Level.OK, Level.WARNING, Level.FAULT]
    assert "mlx5_1 port 1: 1: DOWN" in found[1].seen
    assert len(list(look_at_rdma(tmp_path, UNLIMITED))) == 2


def test_shared_memory_and_files(tmp_path: Path) -> None:
    assert look_at_shared_memory(tmp_path / "none").level is Level.FAULT
    assert look_at_shared_memory(Path("/dev/shm")).level in (Level.OK, Level.WARNING)
    assert look_at_files((1024, 4096), 5120).level is Level.WARNING
    assert look_at_files((1024, 5120), 5120).level is Level.OK  # the router asks for the rest
    assert look_at_files((5120, 5120), 5120).level is Level.OK
    assert look_at_files((UNLIMITED, UNLIMITED), 5120).level is Level.OK


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = look_at_port("router.http_port", "127.0.0.1", port)
        assert found.level is Level.WARNING
        assert "something listens there" in found.seen
    assert look_at_port("router.http_port", "127.0.0.1", 0).level is Level.NOTE
    not_ours = look_at_port("router.http_port", "192.0.2.1", 8000)
    assert not_ours.level is Level.FAULT


def test_checkpoints(tmp_path: Path) -> None:
    assert levels(look_at_checkpoint("")) == [(Level.NOTE, "checkpoint")]
    assert has_fault(look_at_checkpoint(str(tmp_path)))
    whole = make_checkpoint(tmp_path / "whole", "qwen3", num_layers=1)
    assert [one.level for one in look_at_checkpoint(str(whole))] == [Level.OK]
    adapter = whole / "adapter_config.json"
    adapter.write_text("{}")
    assert "adapter" in next(look_at_checkpoint(str(whole))).seen
    adapter.unlink()
    (weights,) = Path(whole).glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-4])
    assert "its header promises" in list(look_at_checkpoint(str(whole)))[-1].seen
    weights.write_bytes(b"")
    assert has_fault(look_at_checkpoint(str(whole)))
    (Path(whole) / "config.json").write_text('{"architectures": ["Unheard"]}')
    assert "Unheard" in list(look_at_checkpoint(str(whole)))[-1].seen
    for text in ("{", "[" * 200_000):
        (Path(whole) / "config.json").write_text(text)
        assert has_fault(look_at_checkpoint(str(whole)))


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "device", "directory"])
def test_a_config_that_is_no_file_is_a_fault_at_once(tmp_path: Path, kind: str) -> None:
    config = make_no_file(tmp_path, kind)
    (found,) = (one for one in look_at_checkpoint(str(tmp_path)) if "config.json" in one.seen)
    assert found.level is Level.FAULT
    assert str(config) in found.seen


def test_weights_that_cannot_be_used_are_never_found_right(tmp_path: Path) -> None:
    folder = Path(make_checkpoint(tmp_path / "whole", "qwen3", num_layers=1))
    weights = folder / "model.safetensors"
    weights.rename(folder / "pytorch_model.bin")
    (found,) = look_at_checkpoint(str(folder))
    assert found.level is Level.FAULT
    assert "PyTorch's own format alone (pytorch_model.bin)" in found.seen
    assert "save_pretrained" in found.advice
    weights.symlink_to("nothing")  # as of a cache of Hugging Face's that was copied in part
    (found,) = look_at_checkpoint(str(folder))
    assert (found.level, found.seen) == (
        Level.FAULT,
        f"{folder}: empty or no file: model.safetensors",
    )


def test_certificates_and_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look_at_certificate("").level is Level.NOTE
    assert look_at_certificate(str(tmp_path)).level is Level.FAULT
    assert levels(look_at_ray("")) == [(Level.NOTE, "ray")]
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    assert levels(look_at_ray("127.0.0.1:1")) == [
        (Level.WARNING, "ray auth"),
        (Level.FAULT, "ray"),
    ]
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert levels(look_at_ray("auto")) == [(Level.FAULT, "ray auth"), (Level.NOTE, "ray")]
    (tmp_path / "token").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as head:
        found = list(look_at_ray(f"127.0.0.1:{head.getsockname()[1]}"))
    assert [one.level for one in found] == [Level.OK, Level.OK]
    assert "secret" not in str(found)


def test_a_key_that_a_group_can_read_is_a_warning(tmp_path: Path) -> None:
    nodes, _ = create_certificates(tmp_path / "made", 90, datetime.now(UTC))
    key = nodes / "tls.key"
    assert look_at_certificate(str(nodes)).level is Level.OK
    key.chmod(0o640)
    if not os.geteuid():  # as Kubernetes mounts it
        assert look_at_certificate(str(nodes)).level is Level.OK
        os.chown(key, 1000, 1000)
    found = look_at_certificate(str(nodes))
    assert (found.level, found.advice) == (Level.WARNING, f"chmod 600 {key}")
    assert found.seen == f"the group of {key} can read it"
    key.chmod(0o644)
    assert look_at_certificate(str(nodes)).level is Level.FAULT


def test_secrets_that_the_settings_name(tmp_path: Path) -> None:
    """`disagg serve` refuses to start without them, on the machine that it is to start on."""
    files = hash_key, keys = tmp_path / "hash-key", tmp_path / "keys.json"
    settings = Settings.model_validate(
        {"cluster": {"hash_key_file": str(hash_key)}, "router": {"api_keys_file": str(keys)}}
    )
    assert list(look_at_secrets(Settings())) == []
    names = ["cluster.hash_key_file", "router.api_keys_file"]
    assert levels(look_at_secrets(settings)) == [(Level.WARNING, name) for name in names]
    for file in files:
        file.write_text("short")
    assert levels(look_at_secrets(settings)) == [(Level.FAULT, name) for name in names]
    hash_key.write_bytes(b"\xff")
    assert next(look_at_secrets(settings)).level is Level.WARNING
    hash_key.write_text(32 * "s")
    keys.write_text('{"keys": []}')
    found = list(look_at_secrets(settings))
    assert levels(found) == [(Level.OK, name) for name in names]
    assert "ssss" not in str(found)


def test_settings_that_cannot_be_used_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_ROUTER__HTTP_PRT", "1")
    found = config_of(None, None, None)
    assert isinstance(found, Finding)
    assert "http_prt" in found.seen
    assert found.level is Level.FAULT


def worker(name: str, role: str, **changed: Any) -> dict[str, Any]:
    return {
        "worker_id": name,
        "role": role,
        "revision": "default",
        "address": "127.0.0.1:1",
        "state": "ready",
        "answered": True,
        "error": "",
        "version": "0.1.0",
        "pool": {"num_blocks_quarantined": 0},
    } | changed


def fleet(*workers: dict[str, Any], **changed: Any) -> dict[str, Any]:
    router = {"router_id": "r", "version": "0.1.0", "model": "tiny", "status": "ok"}
    more = {"ready": True, "missing": []} | changed
    return {"router": router | more, "workers": list(workers)}


def test_fleets() -> None:
    well = fleet(worker("p0", "prefill"), worker("d0", "decode"))
    assert {one.level for one in judge_fleet(well)} == {Level.OK}
    ill = fleet(
        worker("p0", "prefill", answered=False, error="DEADLINE_EXCEEDED"),
        worker("d0", "decode", state="draining", pool={"num_blocks_quarantined": 3}),
        worker("d1", "decode", version="0.2.0"),
        ready=False,
        missing=["prefill"],
    )
    found = list(judge_fleet(ill))
    assert levels(found) == [
        (Level.FAULT, "router"),
        (Level.FAULT, "roles"),
        (Level.FAULT, "worker p0"),
        (Level.WARNING, "worker d0"),
        (Level.WARNING, "worker d0"),
        (Level.OK, "worker d1"),
        (Level.WARNING, "versions"),
    ]
    table = draw(found)
    assert table.row_count == len(found)
    body, (fault,) = look_at_router("http://127.0.0.1:1", 5)
    assert body is None
    assert "--url" in fault.advice


def record_of(prefill: str, decode: str, *, cause: str = "") -> dict[str, Any]:
    transfer = {"groups": [GROUP], "num_reads": 3, "read_ms": 4}
    generation = {
        "prefill": {"worker_id": prefill},
        "decode": {"worker_id": decode},
        "transfer": None if cause else transfer,
        "cause": cause,
    }
    return {"generations": [generation]}


def test_every_pair_is_judged_measured_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [worker(name, role) for name, role in (("p", "prefill"), ("d", "decode"))]
    others = [worker("e", "decode"), worker("f", "decode"), worker("g", "decode", revision="new")]
    body = fleet(*workers, *others)
    assert pairs_of(body["workers"]) == {("p", "d"), ("p", "e"), ("p", "f")}
    answers = iter([record_of("p", "d"), record_of("p", "e", cause="read_failed")] * 1000)
    asked = []

    def answer(*_: Any) -> dict[str, Any]:
        asked.append(1)
        return next(answers)

    monkeypatch.setattr("disagg.commands.transfer_findings._hand_over", answer)
    ports = Ports("http://127.0.0.1:1", "http://127.0.0.1:1", 5)
    seen, failed, missing = measure_pairs(body, ports, 8)
    assert seen.seen == "1953 KiB in 3 READs, 4 ms: 500.0 MB/s"
    assert (failed.level, failed.subject) == (Level.FAULT, "p → e")
    assert (missing.level, missing.subject) == (Level.WARNING, "p → f")
    assert len(asked) <= ROUNDS_MAX * 6
    (alone,) = measure_pairs(fleet(worker("b", "both")), ports, 8)
    assert alone.level is Level.NOTE
    assert "over 2000.0 MB/s" in measured({"groups": [GROUP], "num_reads": 1, "read_ms": 0})


def test_a_router_that_is_away_is_one_finding() -> None:
    body = fleet(worker("p", "prefill"), worker("d", "decode"))
    ports = Ports("http://127.0.0.1:1", "http://127.0.0.1:1", 5)
    (found,) = measure_pairs(body, ports, 8)
    assert found.level is Level.FAULT
    assert "nobody answers at http://127.0.0.1:1" in found.seen
    assert sys.version_info >= (3, 11)
