"""Where settings come from: defaults < file < environment < flags, each value with its source."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from disagg.config.settings import Settings
from disagg.errors import ConfigError

PREFIX = "DISAGG_"
CONFIG_VARIABLE = "DISAGG_CONFIG"
"""Names the configuration file when no flag does."""
KEY_VARIABLE = "DISAGG_API_KEY"
"""What commands that ask a router show it; no setting."""
TEST_PREFIX = "DISAGG_TEST_"
"""Variables that the tests read; no settings."""
FILE_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Given:
    """A value somebody gave, and where."""

    value: object
    source: str
    """file:PATH:LINE, env:VARIABLE or flag:--NAME."""


@dataclass(frozen=True, slots=True)
class Effective:
    """Settings with the source of each value, by dotted key."""

    settings: Settings
    sources: Mapping[str, str]
    """default, file:PATH:LINE, env:VARIABLE or flag:--NAME."""


def setting_types() -> dict[str, Any]:
    """Type of every setting by dotted key, in the order they are declared."""
    types: dict[str, Any] = {}
    for section, field in Settings.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        for key, inner in model.model_fields.items():
            types[f"{section}.{key}"] = inner.annotation
    return types


def read_settings(
    path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Given] | None = None,
) -> Effective:
    """Merge all sources and validate the result.

    Args:
        path: configuration file; None takes ``DISAGG_CONFIG`` if it is set.
        environ: environment variables; every ``DISAGG_*`` but ``DISAGG_TEST_*`` and
            ``DISAGG_API_KEY`` must be a setting.
        flags: values given as flags, by dotted key.

    Raises:
        ConfigError: a file cannot be read, a key is unknown, a value is out of range; the message
            has one line per fault, naming key and source.
    """
    environ = environ or {}
    if path is None and environ.get(CONFIG_VARIABLE):
        path = environ[CONFIG_VARIABLE]
    given: dict[str, Given] = {}
    if path is not None:
        given |= read_file(Path(path))
    given |= read_environment(environ)
    given |= flags or {}
    return _validate(given)


def read_file(path: Path) -> dict[str, Given]:
    """Settings of a YAML file; sections of keys, nothing deeper.

    Raises:
        ConfigError: unreadable, not YAML, a key twice, or no sections of keys.
    """
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)  # /dev/zero has no end
        if len(data) > FILE_BYTES_MAX:
            raise ConfigError(f"{path}: larger than {FILE_BYTES_MAX} bytes")
        return _read_yaml(data.decode(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date without such a day
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error


def read_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """Settings among environment variables: ``DISAGG_ROUTER__HTTP_PORT`` is router.http_port."""
    given: dict[str, Given] = {}
    for name, text in sorted(environ.items()):
        if name.startswith(TEST_PREFIX) or name in (CONFIG_VARIABLE, KEY_VARIABLE):
            continue
        if name.startswith(PREFIX):
            key = name.removeprefix(PREFIX).lower().replace("__", ".", 1)
            given[key] = Given(parse_text(key, text), f"env:{name}")
    return given


def parse_text(key: str, text: str) -> object:
    """Value of a setting written as text, in the environment or behind ``--set``."""
    kind = setting_types().get(key)
    if kind is str or kind is None:
        return text
    if get_origin(kind) is tuple:
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return text if value is None else value


def unknown_key(key: str) -> str:
    """Message about a key that is no setting, with the nearest name that is one."""
    keys = list(setting_types())
    near = [known for known in keys if known.split(".")[1] == key.rpartition(".")[2]]
    names = keys if "." in key else [*Settings.model_fields, *keys]  # sections come first
    near = near or difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    return f"{key} is not a setting" + (f" (did you mean {near[0]}?)" if near else "")


def _read_yaml(text: str, path: str) -> dict[str, Given]:
    loader = yaml.SafeLoader(text)
    root = loader.get_single_node()
    given: dict[str, Given] = {}
    for section, node, line in _entries(root, path, "the file"):
        if section not in Settings.model_fields:
            raise ConfigError(f"{unknown_key(section)} [file:{path}:{line}]", param=section)
        for name, value, value_line in _entries(node, path, section):
            key = f"{section}.{name}"
            parsed = loader.construct_object(value, deep=True)
            given[key] = Given(parsed, f"file:{path}:{value_line}")
    return given


def _entries(node: yaml.Node | None, path: str, what: str) -> list[tuple[str, yaml.Node, int]]:
    """Keys, values and lines of a mapping; PyYAML itself would let the last of two keys win."""
    if node is None or (isinstance(node, yaml.ScalarNode) and node.value in ("", "~", "null")):
        return []
    if not isinstance(node, yaml.MappingNode):
        line = node.start_mark.line + 1
        raise ConfigError(f"{what} must hold keys with values [file:{path}:{line}]", param=what)
    entries: list[tuple[str, yaml.Node, int]] = []
    lines: dict[str, int] = {}
    for key_node, value in node.value:
        line = key_node.start_mark.line + 1
        name = str(key_node.value)
        if name in lines:
            raise ConfigError(
                f"{name} is given twice, in lines {lines[name]} and {line} [file:{path}:{line}]",
                param=name,
            )
        lines[name] = line
        entries.append((name, value, line))
    return entries


def _validate(given: dict[str, Given]) -> Effective:
    types = setting_types()
    unknown = {key: value for key, value in given.items() if key not in types}
    if unknown:
        faults = [f"{unknown_key(key)} [{value.source}]" for key, value in unknown.items()]
        raise ConfigError("\n".join(faults), param=next(iter(unknown)))
    tree: dict[str, dict[str, object]] = {}
    for dotted, item in given.items():
        section, _, key = dotted.partition(".")
        tree.setdefault(section, {})[key] = item.value
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        messages: dict[str, list[str]] = {}
        for detail in error.errors():  # one for each type that a value could have had
            key, message = _locate(detail["loc"], detail["msg"])
            messages.setdefault(key, []).append(message)
        faults = [
            f"{key}: {' or '.join(texts)}" + (f" [{given[key].source}]" if key in given else "")
            for key, texts in messages.items()
        ]
        raise ConfigError("\n".join(faults), param=next(iter(messages))) from None
    sources = {key: given[key].source if key in given else "default" for key in types}
    return Effective(settings, sources)


def _locate(loc: tuple[int | str, ...], message: str) -> tuple[str, str]:
    """Dotted key and text of a fault; faults between fields name their key themselves."""
    parts = [str(part) for part in loc if isinstance(part, str)]
    message = message.removeprefix("Value error, ").removeprefix("Input ")
    if len(parts) < 2:
        key, _, message = message.partition(": ")
        return ".".join([*parts, key]), message
    return ".".join(parts[:2]), message
