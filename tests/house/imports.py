"""Reads every import of the tree and holds it against the arrows of the design."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CORE: dict[str, tuple[str, ...]] = {
    "errors": (),
    "messages": ("errors",),
    "kv": ("errors", "messages"),
    "transfer": ("errors", "messages", "kv"),
    "scheduling": ("errors", "messages", "kv", "transfer"),
    "routing": ("errors", "messages", "kv.kinds"),
}
"""Each room of the core and what it may import besides itself: a room, or one folder of it."""
CHECKING = ("checking", "testing", "simulation")
SHELLS = ("workers", "router")
COMPOSITION = ("config", "cluster", "commands")

CORE_STDLIB = {
    "__future__", "abc", "array", "bisect", "collections", "contextlib", "copy", "dataclasses",
    "enum", "fractions", "functools", "hashlib", "heapq", "hmac", "itertools", "json", "math",
    "numbers", "operator", "re", "statistics", "string", "struct", "sys", "textwrap", "types",
    "typing",
}  # fmt: skip
"""What the core may use; clocks, sockets, files, processes and chance enter as arguments."""
CORE_BANNED = {"socket", "threading", "time", "random", "secrets", "os", "asyncio", "subprocess"}
CORE_BANNED_CALLS = {"open", "input", "print", "exec", "eval", "__import__"}

ARRAYS_AT = ("disagg.routing.buckets", "disagg.routing.positions")
"""The prefix index: many values at once by numpy, which does no I/O (decision 29)."""

GRPC = {"grpc", "google"}
THIRD_PARTY: dict[str, set[str]] = {
    "wire": GRPC,
    "grammar": {"llguidance", "numpy"},
    "tls": GRPC | {"cryptography"},
    "telemetry": {"opentelemetry"},
    "checking": set(),
    "testing": set(),
    "simulation": set(),
    "workers": GRPC
    | {"torch", "transformers", "safetensors", "numpy", "nixl", "ray", "prometheus_client"}
    | {"msgpack", "opentelemetry", "zmq"}
    | {"obstore", "xxhash"},
    "router": GRPC
    | {"uvicorn", "httptools", "transformers", "tokenizers", "jinja2", "pydantic", "pydantic_core"}
    | {"numpy", "prometheus_client", "opentelemetry", "msgpack", "zmq"},
}
RAY_AT = (
    "disagg.workers.actor",
    "disagg.cluster",
    "disagg.workers.engines.vllm.executors",
    "disagg.workers.engines.vllm.ray_on_cpu",
)
"""Ray starts and supervises; nothing on the way of a token may depend on it."""
VLLM_AT = "disagg.workers.engines.vllm."
"""An extra: one engine's folder knows it, and is imported only when that engine is chosen."""


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, with the place that imports it."""

    importer: str
    target: str
    path: Path
    line: int


def find_modules(root: Path) -> dict[str, Path]:
    """Dotted name of every module under the installed name, each file once."""
    modules: dict[str, Path] = {}
    for folder, prefix in (("disagg", ()), ("workers", ("disagg",)), ("router", ("disagg",))):
        for path in sorted((root / folder).rglob("*.py")):
            relative = path.relative_to(root)
            if folder == "disagg" and relative.parts[1] in SHELLS:
                continue  # the link; its target is walked by its own name
            parts = (*prefix, *relative.with_suffix("").parts)
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = path
    return modules


def read_imports(name: str, path: Path, modules: dict[str, Path]) -> Iterator[Import]:
    """Every import of a file: nested ones, type-checking ones and literal import_module too."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, path, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(name, full if full in modules else base, path, node.lineno)
        elif isinstance(node, ast.Call):
            match node.args:
                case [ast.Constant(str(target)), *_] if _called(node).endswith("import_module"):
                    yield Import(name, target, path, node.lineno)


def find_violations(root: Path) -> list[str]:
    """All broken arrows of a tree, one line each; empty when the house stands."""
    modules = find_modules(root)
    graph: dict[str, set[str]] = {}
    found: list[str] = []
    for name, path in modules.items():
        for item in read_imports(name, path, modules):
            reason = _why_forbidden(item)
            if reason:
                where = f"{path.relative_to(root)}:{item.line}"
                found.append(f"{where}: {name} imports {item.target}: {reason}")
            if item.target in modules and item.target != name:
                graph.setdefault(name, set()).add(item.target)
        found += _banned_calls(root, name, path)
    found += _outside(root)
    circle = find_circle(graph)
    if circle:
        found.append("import circle: " + " -> ".join(circle))
    return found


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of the graph, first name repeated at its end; empty when there is none."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return []
        for target in sorted(graph.get(name, ())):
            circle = visit(target, [*trail, name])
            if circle:
                return circle
        done.add(name)
        return []

    for name in sorted(graph):
        circle = visit(name, [])
        if circle:
            return circle
    return []


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def _why_forbidden(item: Import) -> str:
    """Why an import breaks the house, "" when it does not."""
    room = _room(item.importer)
    top = item.target.split(".")[0]
    if top in SHELLS:
        return "shells are named disagg.workers and disagg.router"
    if room == "":
        return "disagg/__init__ imports nothing"
    if room not in (*CORE, *CHECKING, *SHELLS, *COMPOSITION, "wire", "grammar", "tls", "telemetry"):
        return f"room {room} is not in the design"
    if top == "disagg":
        return _why_not_inside(room, item.target)
    if top == "ray" and not item.importer.startswith(RAY_AT):
        return "Ray belongs to the actor and the cluster"
    if top == "vllm":
        return "" if item.importer.startswith(VLLM_AT) else "vLLM belongs to its engine"
    if room in CORE:
        if top in CORE_BANNED:
            return "the core is sans-IO: it comes in as an argument"
        if top == "numpy" and item.importer in ARRAYS_AT:
            return ""
        return "" if top in CORE_STDLIB else "not among the modules the core may use"
    if room in COMPOSITION or top in sys.stdlib_module_names:
        return ""
    return "" if top in THIRD_PARTY[room] else f"not a third-party package of {room}"


def _why_not_inside(room: str, module: str) -> str:
    target = _room(module)
    if room in COMPOSITION or target == room:
        return ""
    if target in COMPOSITION:
        return "nobody imports composition"
    allowed: tuple[str, ...] = tuple(CORE)
    if room in CORE:
        allowed = CORE[room]
    elif room == "wire":
        allowed = ("errors", "messages")
    elif room in ("grammar", "tls", "telemetry"):
        allowed = ("errors",)
    elif room in CHECKING:
        allowed = (*CORE, *CHECKING)
    elif room in SHELLS:
        allowed = (*CORE, "wire", "grammar", "tls", "telemetry")
    if any(f"{module}.".startswith(f"disagg.{name}.") for name in allowed):
        return ""
    return f"{room} may import only {', '.join(allowed) or 'nothing'}"


def _banned_calls(root: Path, name: str, path: Path) -> Iterator[str]:
    if _room(name) not in CORE:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called = node.func.id
            if called in CORE_BANNED_CALLS:
                where = f"{path.relative_to(root)}:{node.lineno}"
                yield f"{where}: {name} calls {called}(): the core does no I/O"


def _outside(root: Path) -> Iterator[str]:
    """Bare names in what is not installed: tests, demo, benchmarks."""
    for folder in ("tests", "demo", "benchmarks"):
        for path in sorted((root / folder).rglob("*.py")):
            for item in read_imports(folder, path, {}):
                if item.target.split(".")[0] in SHELLS:
                    where = f"{path.relative_to(root)}:{item.line}"
                    yield f"{where}: imports {item.target}: say disagg.{item.target}"
