"""The arrows between rooms; every forbidden one is planted once as its own control."""

from pathlib import Path

import pytest

from tests.house.imports import CORE_BANNED, find_circle, find_modules, find_violations
from tests.written_files import write_files

ROOT = Path(__file__).parents[2]

SOUND = {
    "disagg/__init__.py": "",
    "disagg/errors.py": "from typing import Any\n",
    "disagg/kv/__init__.py": "",
    "disagg/messages/__init__.py": "",
    "disagg/messages/peer.py": "from disagg.errors import E\n",
    "disagg/kv/pool.py": "import heapq\nfrom ..errors import E\nfrom ..messages import peer\n",
    "disagg/kv/kinds/__init__.py": "",
    "disagg/kv/kinds/registry.py": "",
    "disagg/transfer/__init__.py": "",
    "disagg/transfer/owner.py": "from disagg.kv.pool import P\n",
    "disagg/scheduling/__init__.py": "",
    "disagg/scheduling/batch.py": "from disagg.transfer import owner\n",
    "disagg/routing/__init__.py": "",
    "disagg/routing/policy.py": "from ..messages import peer\nfrom ..kv.kinds import registry\n",
    "disagg/wire/__init__.py": "",
    "disagg/wire/codec.py": "import grpc\nimport google.protobuf\nfrom ..messages import peer\n",
    "disagg/grammar/__init__.py": "",
    "disagg/grammar/compiler.py": "import llguidance\nfrom disagg.errors import E\n",
    "disagg/telemetry/__init__.py": "",
    "disagg/telemetry/exporters.py": "import opentelemetry\nfrom disagg.errors import E\n",
    "disagg/checking/__init__.py": "",
    "disagg/checking/explorer.py": "import random\nfrom disagg.transfer import owner\n",
    "disagg/testing/__init__.py": "",
    "disagg/config.py": "import yaml\n",
    "disagg/commands/__init__.py": "",
    "disagg/commands/main.py": "from ..cluster import local\nfrom ..workers import actor\n",
    "disagg/cluster/__init__.py": "",
    "disagg/cluster/local.py": "import ray\nfrom disagg.router import app\n",
    "workers/__init__.py": "",
    "workers/actor.py": "import ray\nfrom disagg.workers import options\n",
    "workers/options.py": "import torch\n",
    "workers/engines/__init__.py": "",
    "workers/engines/vllm/__init__.py": "",
    "workers/engines/vllm/runner.py": "from vllm import v1\n",
    "router/__init__.py": "",
    "router/app.py": "import uvicorn\nfrom disagg.wire import codec\n",
    "tests/test_it.py": "from disagg.workers import options\n",
}

FORBIDDEN = [
    *[("disagg/kv/pool.py", f"import {name}", "sans-IO") for name in sorted(CORE_BANNED)],
    ("disagg/kv/pool.py", "from time import monotonic", "sans-IO"),
    ("disagg/kv/pool.py", "def f():\n    import os.path", "sans-IO"),
    ("disagg/kv/pool.py", "if TYPE_CHECKING:\n    import socket", "sans-IO"),
    ("disagg/kv/pool.py", "import uuid", "not among the modules the core may use"),
    ("disagg/kv/pool.py", "import importlib\nimportlib.import_module('torch')", "not among"),
    ("disagg/routing/index.py", "import numpy", "not among the modules the core may use"),
    ("disagg/routing/policy.py", "import numpy", "not among the modules the core may use"),
    ("disagg/kv/pool.py", "open('x')", "no I/O"),
    # floors: upwards, and out of the core
    ("disagg/errors.py", "import disagg.kv.pool", "may import only nothing"),
    ("disagg/kv/pool.py", "import disagg.transfer.owner", "kv may import only errors, messages"),
    ("disagg/kv/pool.py", "from ..transfer import owner", "kv may import only errors, messages"),
    ("disagg/transfer/owner.py", "from disagg.scheduling import batch", "transfer may import"),
    ("disagg/scheduling/batch.py", "from disagg.routing import policy", "scheduling may import"),
    ("disagg/messages/peer.py", "import disagg.kv.pool", "messages may import only errors"),
    ("disagg/routing/policy.py", "import disagg.wire.codec", "routing may import only"),
    ("disagg/routing/policy.py", "from ..scheduling import batch", "routing may import only"),
    ("disagg/routing/policy.py", "import disagg.transfer.owner", "routing may import only"),
    ("disagg/routing/policy.py", "import disagg.kv.pool", "routing may import only"),
    ("disagg/transfer/owner.py", "import disagg.checking.explorer", "transfer may import only"),
    ("disagg/transfer/owner.py", "import disagg.workers", "transfer may import only"),
    ("disagg/routing/policy.py", "import disagg.router.app", "routing may import only"),
    # wire
    ("disagg/wire/codec.py", "import torch", "not a third-party package of wire"),
    ("disagg/wire/codec.py", "import disagg.workers.options", "wire may import only"),
    ("disagg/wire/codec.py", "import disagg.kv.pool", "wire may import only"),
    ("disagg/wire/codec.py", "import disagg.checking", "wire may import only"),
    # grammar
    ("disagg/grammar/compiler.py", "from disagg.messages import peer", "grammar may import only"),
    ("disagg/grammar/compiler.py", "import torch", "not a third-party package of grammar"),
    ("disagg/wire/codec.py", "import disagg.grammar.compiler", "wire may import only"),
    ("router/app.py", "import llguidance", "not a third-party package of router"),
    # telemetry
    ("disagg/telemetry/exporters.py", "import grpc", "not a third-party package of telemetry"),
    ("disagg/telemetry/exporters.py", "import disagg.messages", "telemetry may import only"),
    ("disagg/routing/policy.py", "import disagg.telemetry.exporters", "routing may import only"),
    # checking and testing
    ("disagg/checking/explorer.py", "import disagg.wire.codec", "checking may import only"),
    ("disagg/testing/__init__.py", "import disagg.workers.options", "testing may import only"),
    ("disagg/testing/__init__.py", "import hypothesis", "not a third-party package of testing"),
    # shells
    ("workers/options.py", "from disagg.router import app", "workers may import only"),
    ("router/app.py", "from disagg.workers.options import W", "router may import only"),
    ("router/app.py", "from ..workers import options", "router may import only"),
    ("workers/options.py", "import disagg.testing", "workers may import only"),
    ("router/app.py", "import torch", "not a third-party package of router"),
    ("workers/options.py", "import uvicorn", "not a third-party package of workers"),
    ("workers/options.py", "import ray", "Ray belongs to"),
    ("router/app.py", "import ray", "Ray belongs to"),
    ("workers/options.py", "import vllm", "vLLM belongs to"),
    ("workers/engines/choice.py", "from vllm import v1", "vLLM belongs to"),
    # composition
    *[
        (importer, f"import disagg.{room}", "nobody imports composition")
        for room in ("config", "cluster.local", "commands")
        for importer in ("workers/options.py", "router/app.py", "disagg/kv/pool.py")
    ],
    ("disagg/wire/codec.py", "from disagg import config", "nobody imports composition"),
    ("disagg/checking/explorer.py", "import disagg.commands", "nobody imports composition"),
    # names
    ("disagg/__init__.py", "import disagg.errors", "imports nothing"),
    ("disagg/commands/main.py", "import workers.options", "shells are named"),
    ("disagg/commands/main.py", "from router import app", "shells are named"),
    ("tests/test_it.py", "from workers import options", "say disagg.workers"),
    ("disagg/extras/__init__.py", "import typing", "not in the design"),
    # circles
    ("workers/options.py", "from disagg.workers import actor", "import circle"),
]


def test_the_house_stands() -> None:
    assert find_violations(ROOT) == []


def test_every_room_is_read() -> None:
    modules = find_modules(ROOT)
    for name in ("disagg.errors", "disagg.messages.registration", "disagg.workers.options"):
        assert name in modules
    assert modules["disagg.router.options"] == ROOT / "router/options.py"


def test_a_sound_tree_passes(tmp_path: Path) -> None:
    assert find_violations(write_files(tmp_path, SOUND)) == []


@pytest.mark.parametrize(("file", "planted", "reason"), FORBIDDEN)
def test_a_forbidden_arrow_is_seen(tmp_path: Path, file: str, planted: str, reason: str) -> None:
    tree = SOUND | {file: f"{SOUND.get(file, '')}{planted}\n"}
    found = find_violations(write_files(tmp_path, tree))
    assert any(reason in line for line in found), found


def test_a_package_may_hand_on_names_but_not_be_imported_from_within(tmp_path: Path) -> None:
    handing_on = SOUND | {"disagg/kv/__init__.py": "from disagg.kv.pool import P\n"}
    assert find_violations(write_files(tmp_path / "a", handing_on)) == []
    circle = handing_on | {"disagg/kv/pool.py": "from disagg.kv import Q\n"}
    assert "import circle" in "".join(find_violations(write_files(tmp_path / "b", circle)))


def test_a_long_circle_is_named() -> None:
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c", "b"]
