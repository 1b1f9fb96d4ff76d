"""Settings: sources, their order, and what is refused by name."""

import os
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from pydantic import ValidationError

from disagg.config import read_settings, router_options, worker_options
from disagg.config.settings import CacheSettings, ModelSettings, Settings
from disagg.config.sources import Given, setting_types
from disagg.errors import ConfigError
from disagg.kv.blocks.cache_policy import EVICTIONS
from disagg.router.message_parts.formats import REASONING_PARSER_NAMES, TOOL_PARSER_NAMES
from disagg.router.options import RouterOptions
from disagg.workers.options import WorkerOptions

SECRET = "the secret of a cluster in a test"


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "disagg.yaml"
    path.write_text(text)
    return path


def _checkpoint(tmp_path: Path) -> str:
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


def _flags(tmp_path: Path) -> dict[str, Given]:
    """A checkpoint and a secret, without which nothing starts."""
    return {
        "model.dir": Given(_checkpoint(tmp_path), "flag:--model"),
        "cluster.hash_key": Given(SECRET, "flag:--set"),
    }


def test_nothing_given_is_all_defaults() -> None:
    effective = read_settings()
    assert set(effective.sources.values()) == {"default"}
    assert list(effective.sources) == list(setting_types())


def test_flags_beat_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = _file(tmp_path, "router:\n  http_port: 1\n  grpc_port: 2\n  replans_max: 3\n")
    effective = read_settings(
        path,
        {"DISAGG_ROUTER__HTTP_PORT": "11", "DISAGG_ROUTER__GRPC_PORT": "12", "PATH": "/bin"},
        {"router.http_port": Given(21, "flag:--http-port")},
    )
    router = effective.settings.router
    assert (router.http_port, router.grpc_port, router.replans_max) == (21, 12, 3)
    assert effective.settings.limits.requests_max == 1024
    assert effective.sources["router.http_port"] == "flag:--http-port"
    assert effective.sources["router.grpc_port"] == "env:DISAGG_ROUTER__GRPC_PORT"
    assert effective.sources["router.replans_max"] == f"file:{path}:4"
    assert effective.sources["limits.requests_max"] == "default"


def test_the_environment_names_the_file(tmp_path: Path) -> None:
    path = _file(tmp_path, "cluster:\n  num_decode: 3\n")
    assert read_settings(environ={"DISAGG_CONFIG": str(path)}).settings.cluster.num_decode == 3


def test_what_a_worker_decides_itself_is_auto() -> None:
    worker = read_settings().settings.worker
    assert {worker.device, worker.dtype, worker.num_threads, worker.num_blocks} == {"auto"}
    environ = {"DISAGG_WORKER__NUM_BLOCKS": "64", "DISAGG_WORKER__NUM_THREADS": "auto"}
    worker = read_settings(environ=environ).settings.worker
    assert (worker.num_blocks, worker.num_threads) == (64, "auto")


def test_variables_of_the_tests_are_no_settings() -> None:
    assert set(read_settings(environ={"DISAGG_TEST_X": "1"}).sources.values()) == {"default"}
    with pytest.raises(ConfigError, match="not a setting"):
        read_settings(environ={"DISAGG_TESTX": "1"})


def test_text_becomes_the_type_of_the_setting() -> None:
    environ = {
        "DISAGG_CLUSTER__ROUTER_ADDRESSES": "a:1, b:2",
        "DISAGG_CLUSTER__ROLE_RESOURCES": "true",
        "DISAGG_CLUSTER__NUM_CPUS_PER_WORKER": "2",
        "DISAGG_MODEL__NAME": "0123",
        "DISAGG_WORKER__TIERS": "host?size=1GiB, disk:/var/kv?size=2GiB&write=reuse",
    }
    settings = read_settings(environ=environ).settings
    assert settings.cluster.router_addresses == ("a:1", "b:2")
    assert settings.cluster.role_resources is True
    assert settings.cluster.num_cpus_per_worker == 2
    assert settings.model.name == "0123"
    assert settings.worker.tiers == ("host?size=1GiB", "disk:/var/kv?size=2GiB&write=reuse")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("router:\n  http_prot: 1\n", "router.http_prot is not a setting (did you mean router.ht"),
        ("routr:\n  http_port: 1\n", "routr is not a setting (did you mean router?)"),
        ("http_port: 1\n", "http_port is not a setting (did you mean router.http_port?)"),
        ("router:\n  num_blocks: 1\n", "(did you mean worker.num_blocks?)"),
        ("router:\n  <<: {http_port: 1}\n", "router.<< is not a setting"),
        ("router:\n  http_port: 1\n  http_port: 2\n", "http_port is given twice, in lines 2 and 3"),
        ("router: {}\nrouter: {}\n", "router is given twice, in lines 1 and 2"),
        ("router: 5\n", "router must hold keys with values"),
        ("- 1\n", "the file must hold keys with values"),
        ("a: [\n", "not YAML"),
        ("model: {dir: 2026-13-45}\n", "not YAML"),
        ("[" * 10_000, "not YAML"),
        (
            "router:\n  http_port: 70000\n",
            "router.http_port: should be less than or equal to 65535",
        ),
        ("router:\n  http_port: '80'\n", "router.http_port: should be a valid integer"),
        ("router:\n  http_port: true\n", "router.http_port: should be a valid integer"),
        ("router:\n  http_port: 1.5\n", "router.http_port: should be a valid integer"),
        ("router:\n  http_port: [1]\n", "router.http_port: should be a valid integer"),
        (
            "router:\n  http_port: 5\n  grpc_port: 5\n",
            "router.grpc_port: must differ from router.h",
        ),
        (
            "router:\n  http_port: 8002\n  admin_port: 8001\n  processes: 2\n",
            "router.processes: each needs an admin port of its own, 8001 to 8002, and 8002 is tak",
        ),
        (
            "router:\n  admin_port: 65535\n  processes: 2\n",
            "router.processes: each needs an admin port of its own, 65535 to 65536, of at most",
        ),
        ("router:\n  processes: 0\n", "router.processes: should be greater than or equal to 1"),
        (
            "model:\n  tool_call_parser: xml\n",
            "model.tool_call_parser: should be 'auto', 'none', 'deepseek'",
        ),
        (
            "model:\n  reasoning_parser: xml\n",
            "model.reasoning_parser: should be 'auto', 'none', 'harmony' or 'think'",
        ),
        (
            "router:\n  policy: dice\n",
            "router.policy: 'dice' is not known; known: cache_affinity, ",
        ),
        (
            "router:\n  processes: 16\n",
            "router.processes: each has a session with every worker, and so has one that takes a",
        ),
        ("router:\n  worker_silent_ms: 10\n", "router.worker_silent_ms: must be at least twice"),
        (
            "cache:\n  retention_interval_tokens: 16\n",
            "cache.retention_interval_tokens: needs cache.retention=sparse",
        ),
        (
            "cache:\n  prefix_caching: false\n  retention: sparse\n",
            "cache.retention: sparse needs cache.prefix_caching",
        ),
        (
            "cache:\n  prefix_caching: false\nworker:\n  kv_events_endpoint: tcp://*:1\n",
            "worker.kv_events_endpoint: needs cache.prefix_caching",
        ),
        ("cache:\n  eviction: fifo\n", "cache.eviction: should be 'lru' or 'segmented_lru'"),
        ("cache:\n  residency_sample: 2\n", "cache.residency_sample: should be less than or"),
        ("worker:\n  block_tokens: 24\n", "worker.block_tokens: 24 is not a power of two"),
        ("worker:\n  block_tokens: 0\n", "worker.block_tokens: should be greater than or equal"),
        ("worker:\n  block_tokens: all\n", "worker.block_tokens: should be a valid integer or"),
        (
            "worker:\n  kv_events_replay_endpoint: tcp://*:1\n",
            "worker.kv_events_replay_endpoint: needs kv_events_endpoint",
        ),
        ("worker:\n  tiers: [disk:/kv]\n", "worker.tiers: 'disk:/kv': size is missing"),
        ("worker:\n  device: tpu\n", "worker.device: String should match pattern"),
        (
            "worker:\n  dtype: int8\n",
            "worker.dtype: should be 'float32', 'bfloat16' or 'float16' or ",
        ),
        (
            "worker:\n  num_blocks: 1\n",
            "worker.num_blocks: should be greater than or equal to 2 or",
        ),
        ("worker:\n  num_blocks: all\n", "worker.num_blocks: should be a valid integer or should"),
        ("transfer:\n  handover_share_max: 1.5\n", "transfer.handover_share_max: should be less"),
        ("transfer:\n  handover_share_max: .nan\n", "transfer.handover_share_max: should be"),
        ("transfer:\n  reserve_retry_min_ms: 99\n", "transfer.reserve_retry_min_ms: must not"),
        ("cluster:\n  num_prefill: 0\n  num_decode: 0\n", "there must be at least one worker"),
        ("cluster:\n  router_addresses: [nohost]\n", "cluster.router_addresses: String should"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(_file(tmp_path, text))
    assert said in caught.value.message


def test_a_fault_names_its_line_and_all_faults_are_told(tmp_path: Path) -> None:
    path = _file(tmp_path, "router:\n  http_port: -1\nworker:\n  num_blocks: x\n")
    with pytest.raises(ConfigError) as caught:
        read_settings(path)
    first, second = sorted(caught.value.message.splitlines())
    assert first.endswith(f"[file:{path}:2]")
    assert second.endswith(f"[file:{path}:4]")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"DISAGG_ROUTER__HTTP_PROT": "1"}, "did you mean router.http_port?"),
        ({"DISAGG_ROUTER_HTTP_PORT": "1"}, "[env:DISAGG_ROUTER_HTTP_PORT]"),
        ({"DISAGG_ROUTER__HTTP_PORT": ""}, "router.http_port: should be a valid integer"),
        ({"DISAGG_ROUTER__HTTP_PORT": "a: ["}, "router.http_port: should be a valid integer"),
        ({"DISAGG_CONFIG": "/nowhere.yaml"}, "/nowhere.yaml: No such file"),
    ],
)
def test_a_bad_variable_is_refused_by_name(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(environ=environ)
    assert said in caught.value.message


def test_defaults_are_those_of_the_options(tmp_path: Path) -> None:
    effective = read_settings(flags=_flags(tmp_path))
    for options in (
        worker_options(effective.settings, "w", "both"),
        router_options(effective.settings),
    ):
        for field in fields(options):
            if field.default is not MISSING and field.name != "hash_key":
                assert getattr(options, field.name) == field.default, field.name


def test_every_option_can_be_set() -> None:
    known = {key.split(".")[1] for key in setting_types()}
    computed = {"worker_id", "role", "model_dir", "model_name", "port", "roles_wanted"}
    computed |= {"workers_per_host", "workers_per_gpu"}
    for options in (WorkerOptions, RouterOptions):
        assert {field.name for field in fields(options)} <= known | computed


def test_every_order_of_eviction_can_be_set() -> None:
    for options in (CacheSettings, WorkerOptions):
        assert get_args(get_type_hints(options)["eviction"]) == tuple(EVICTIONS)


def test_workers_find_the_router(tmp_path: Path) -> None:
    flags = _flags(tmp_path)
    flags["router.host"] = Given("0.0.0.0", "flag:--set")
    flags["router.allow_unauthenticated"] = Given(True, "flag:--set")
    options = worker_options(read_settings(flags=flags).settings, "prefill-0", "prefill")
    assert options.router_addresses == ("127.0.0.1:50051",)
    assert (options.model_name, options.worker_id) == ("tiny-model", "prefill-0")
    flags["cluster.router_addresses"] = Given(["r1:1", "r2:2"], "flag:--set")
    options = worker_options(read_settings(flags=flags).settings, "prefill-0", "prefill")
    assert options.router_addresses == ("r1:1", "r2:2")


@pytest.mark.parametrize(
    ("source", "accepted"),
    [
        ("router:50051", True),
        ("dns:routers.svc:50051", True),
        ("ray", True),
        ("dns:routers.svc", False),
        ("etcd:routers:1", False),
        ("rays", False),
    ],
)
def test_where_routers_are_found(source: str, accepted: bool) -> None:
    given = {"cluster": {"router_addresses": [source]}}
    if accepted:
        assert Settings.model_validate(given).cluster.router_addresses == (source,)
    else:
        with pytest.raises(ValidationError, match="router_addresses"):
            Settings.model_validate(given)


def test_a_missing_checkpoint_or_router_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.dir"):
        router_options(read_settings().settings)
    empty = {"model.dir": Given(str(tmp_path), "flag:--model")}
    with pytest.raises(ConfigError, match=r"no config\.json"):
        router_options(read_settings(flags=empty).settings)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"its config\.json is no file"):
        router_options(read_settings(flags=empty).settings)
    (tmp_path / "config.json").unlink()
    open_port = _flags(tmp_path) | {"router.grpc_port": Given(0, "flag:--set")}
    with pytest.raises(ConfigError, match=r"router\.grpc_port"):
        worker_options(read_settings(flags=open_port).settings, "w", "both")


def test_the_clusters_secret_comes_from_one_place_and_is_in_no_error(tmp_path: Path) -> None:
    path = tmp_path / "hash-key"
    path.write_text(f"{SECRET}\n")
    flags = _flags(tmp_path)
    del flags["cluster.hash_key"]

    def given(**cluster: str) -> dict[str, Given]:
        return flags | {f"cluster.{key}": Given(value, "flag") for key, value in cluster.items()}

    for values in ({"hash_key": SECRET}, {"hash_key_file": str(path)}):
        settings = read_settings(flags=given(**values)).settings
        assert router_options(settings).hash_key == SECRET
        assert worker_options(settings, "w", "both").hash_key == SECRET
        assert SECRET not in repr((settings, router_options(settings)))
    (tmp_path / "short").write_text("SECRET")
    (tmp_path / "bytes").write_bytes(b"SECRET\xff" * 10)
    for values, said in (
        ({}, "disagg keys create-hash-key"),
        ({"hash_key": "SECRET"}, "needs 32 characters, has 6"),
        ({"hash_key_file": str(tmp_path / "short")}, "needs 32 characters, has 6"),
        ({"hash_key_file": str(tmp_path / "none")}, "none: No such file"),
        ({"hash_key_file": str(tmp_path / "bytes")}, "bytes: not text"),
        ({"hash_key_file": str(path), "hash_key": SECRET}, "there is cluster.hash_key_file"),
    ):
        with pytest.raises(ConfigError) as caught:
            router_options(read_settings(flags=given(**values)).settings)
        assert said in caught.value.message
        assert "SECRET" not in caught.value.message
        assert SECRET not in caught.value.message


@pytest.mark.parametrize("key", ["host", "admin_host"])
def test_without_keys_only_loopback_addresses_are_taken(key: str) -> None:
    def read(host: str, **more: object) -> str:
        given = {key: host} | more
        flags = {f"router.{name}": Given(value, "flag") for name, value in given.items()}
        host_taken: str = getattr(read_settings(flags=flags).settings.router, key)
        return host_taken

    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert read(host) == host
    for host in ("0.0.0.0", "::", "192.0.2.10", "router.example.com", "localhost.example.com"):
        with pytest.raises(ConfigError, match=rf"^router\.{key}: .*router\.api_keys_file"):
            read(host)
        for more in ({"api_keys_file": "k"}, {"api_keys": "k"}, {"allow_unauthenticated": True}):
            assert read(host, **more) == host


def test_keys_come_from_one_place() -> None:
    flags = {f"router.{name}": Given("SECRET", "flag") for name in ("api_keys", "api_keys_file")}
    with pytest.raises(ConfigError, match=r"router\.api_keys: there is") as caught:
        read_settings(flags=flags)
    assert "SECRET" not in caught.value.message


def test_a_client_key_in_the_environment_is_no_setting() -> None:
    assert read_settings(environ={"DISAGG_API_KEY": "k"}) == read_settings()


def test_the_parsers_are_those_there_are() -> None:
    fields = ModelSettings.model_fields
    assert get_args(fields["tool_call_parser"].annotation) == TOOL_PARSER_NAMES
    assert get_args(fields["reasoning_parser"].annotation) == REASONING_PARSER_NAMES


@pytest.mark.parametrize(("given", "is_on"), [("on", True), ("off", False)])
def test_checksums_are_switched_on_for_all_workers(tmp_path: Path, given: str, is_on: bool) -> None:
    path = _file(tmp_path, f"transfer:\n  checksums: {given}\n")
    settings = read_settings(path, {}, _flags(tmp_path)).settings
    assert worker_options(settings, "p0", "prefill").checksums is is_on
    said = read_settings(environ={"DISAGG_TRANSFER__CHECKSUMS": given}).settings
    assert said.transfer.checksums is is_on
    assert not read_settings().settings.transfer.checksums, "off unless it is asked for"
