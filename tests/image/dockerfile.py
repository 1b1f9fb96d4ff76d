"""Reads a Dockerfile of the instructions that ours has; anything else is an error, not ignored."""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import PurePosixPath

KNOWN = ("ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


class DockerfileError(ValueError):
    """The file has something that is not known here, or does not fit together."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a stage.

    Attributes:
        name: one of KNOWN.
        text: what stands behind it, lines joined.
    """

    name: str
    text: str

    def assignments(self) -> dict[str, str]:
        """NAME=VALUE of ENV, or of ARG with a default."""
        pairs = [word.partition("=") for word in shlex.split(self.text)]
        return {name: value for name, equals, value in pairs if equals}

    def copied(self) -> tuple[str, list[str], str]:
        """Of COPY: the stage copied from ("": the context), the sources, the destination."""
        words = shlex.split(self.text)
        stage = ""
        if words[0].startswith("--"):
            option, _, stage = words.pop(0).partition("=")
            if option != "--from" or not stage:
                raise DockerfileError(f"COPY {option} is not known here")
        if len(words) < 2 or any("*" in word for word in words):
            raise DockerfileError(f"COPY {self.text}: sources by name, then a destination")
        return stage, words[:-1], words[-1]


@dataclass(slots=True)
class Stage:
    """What begins with FROM.

    Attributes:
        name: behind AS.
        base: another stage, or an image.
    """

    name: str
    base: str
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """All stages, in order; those that a stage needs stand before it.

    Attributes:
        arguments: ARG before the first FROM, with their defaults.
    """

    arguments: dict[str, str]
    stages: dict[str, Stage]

    def needed(self, target: str) -> list[Stage]:
        """The stages that a build of one target runs, in order."""
        wanted = {target}
        for stage in reversed(self.stages.values()):
            if stage.name in wanted:
                wanted.add(stage.base)
                wanted |= {one.copied()[0] for one in stage.instructions if one.name == "COPY"}
        return [stage for stage in self.stages.values() if stage.name in wanted]

    def setting(self, target: str, name: str) -> str:
        """The last USER or WORKDIR that holds in a target; "" where there is none."""
        stage: Stage | None = self.stages[target]
        while stage is not None:
            for one in reversed(stage.instructions):
                if one.name == name:
                    return one.text
            stage = self.stages.get(stage.base)
        return ""

    def environment(self, target: str) -> dict[str, str]:
        """ENV of a target, that of the stages below it included."""
        stage = self.stages.get(target)
        if stage is None:
            return {}
        found = self.environment(stage.base)
        for one in stage.instructions:
            if one.name == "ENV":
                found |= one.assignments()
        return found


def parse(text: str) -> Dockerfile:
    """Read a Dockerfile.

    Raises:
        DockerfileError: something is not known here, or a stage stands behind its use.
    """
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for name, rest in _lines(text):
        if name == "FROM":
            stage = _stage(rest, arguments, stages)
            stages[stage.name] = stage
        elif name not in KNOWN:
            raise DockerfileError(f"{name} is not known here")
        elif rest.startswith(("--mount", "--network", "--chown", "--chmod", "[")):
            raise DockerfileError(f"{name} {rest.split()[0]} is not known here")
        elif stage is not None:
            _check_copy(instruction := Instruction(name, rest), stages, stage.name)
            stage.instructions.append(instruction)
        elif name == "ARG":
            arguments |= Instruction(name, rest).assignments()
        else:
            raise DockerfileError(f"{name} before the first FROM")
    if not stages:
        raise DockerfileError("there is no FROM")
    return Dockerfile(arguments, stages)


def _lines(text: str) -> list[tuple[str, str]]:
    joined = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", text))
    words = [line.strip().partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name.upper(), " ".join(rest.split())) for name, _, rest in words]


def _stage(rest: str, arguments: dict[str, str], stages: dict[str, Stage]) -> Stage:
    found = re.fullmatch(r"(\S+) AS ([a-z][a-z0-9-]*)", rest)
    if found is None:
        raise DockerfileError(f"FROM {rest}: a base AS a name")
    base = expand(found[1], arguments)
    if found[2] in stages:
        raise DockerfileError(f"there are two stages {found[2]}")
    if base not in stages and ":" not in base:
        raise DockerfileError(f"{base} is no stage before {found[2]}, nor an image with a tag")
    return Stage(found[2], base)


def _check_copy(instruction: Instruction, stages: dict[str, Stage], name: str) -> None:
    if instruction.name == "COPY":
        stage, _, _ = instruction.copied()
        if stage and (stage not in stages or stage == name):
            raise DockerfileError(f"{name} copies from {stage}, which is no stage before it")


def expand(text: str, variables: dict[str, str]) -> str:
    """$NAME and ${NAME} by their values; one that has none is an error."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in variables:
            raise DockerfileError(f"${name} has no value")
        return variables[name]

    return _VARIABLE.sub(value, text)


def ignores(lines: str, path: str) -> bool:
    """Whether a .dockerignore of ``*``, ``!NAME`` and ``**/NAME`` keeps a path out."""
    parts, ignored = PurePosixPath(path).parts, False
    for line in lines.splitlines():
        if not (pattern := line.strip()) or pattern.startswith("#"):
            continue
        if pattern.startswith("!"):
            ignored = ignored and parts[0] != pattern[1:]
        elif pattern.startswith("**/"):
            ignored = ignored or pattern[3:] in parts
        elif pattern == "*":
            ignored = True
        else:
            raise DockerfileError(f".dockerignore: {json.dumps(pattern)} is not known here")
    return ignored
