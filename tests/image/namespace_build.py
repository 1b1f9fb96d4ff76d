"""Runs the steps of a Dockerfile without a builder: each in a mount and PID namespace of its own.

A stage is an overlay file system over that of its base; a base image of Debian is what debootstrap
makes of the same release. It needs root.
"""

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tests.image.dockerfile import Dockerfile, Instruction, Stage, expand, ignores

MIRROR = "http://deb.debian.org/debian"
STEP_BOUND_S = 3600.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class UnavailableError(Exception):
    """Something that this needs is not here, or not permitted."""


class StepError(AssertionError):
    """A step of the Dockerfile failed; the text is what it printed."""


@dataclass(slots=True)
class Layers:
    """Folders that lie over each other, the lowest first; the last one takes what is written."""

    below: list[Path]
    own: Path
    variables: dict[str, str] = field(default_factory=dict)
    folder: str = "/"

    def mounts(self, at: Path, work: Path, *, read_only: bool = False) -> list[str]:
        """Shell commands that mount them, with what a process expects besides."""
        lower = ":".join(map(str, reversed(self.below)))
        place = f"lowerdir={lower},upperdir={self.own},workdir={work}"
        if read_only:
            place = f"lowerdir={self.own}:{lower}"
        lines = [f"mount -t overlay overlay -o {place} {at}"]
        lines += [f"mount -t proc proc {at}/proc", f"mount --rbind /dev {at}/dev"]
        if read_only:
            return [*lines, f"mount -t tmpfs tmpfs {at}/tmp"]
        lines += [f"touch {at}/etc/resolv.conf"]
        return [*lines, f"mount --bind /etc/resolv.conf {at}/etc/resolv.conf"]


def require_permission() -> None:
    """Check what is needed before anything is made.

    Raises:
        UnavailableError: with the reason.
    """
    for tool in ("debootstrap", "unshare", "chroot"):
        if shutil.which(tool) is None:
            raise UnavailableError(f"{tool} is not installed")
    if os.getuid() != 0:
        raise UnavailableError("it needs root")
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True
    )
    if tried.returncode:
        raise UnavailableError(f"no namespaces: {tried.stderr.strip()}")


def debian_root(image: str, folder: Path) -> Path:
    """What an image debian:RELEASE-slim begins with, unless the folder has it already."""
    name, _, release = image.partition(":")
    if name != "debian":
        raise UnavailableError(f"{image}: only Debian can be made here")
    root = folder / "base"
    if not (root / "etc/debian_version").exists() or (root / "debootstrap").exists():
        release = release.removesuffix("-slim")
        _run(["debootstrap", "--variant=minbase", release, str(root), MIRROR])
    return root


class NamespaceBuild:
    """The stages of one Dockerfile, run in a folder.

    Args:
        context: the folder that COPY copies from.
        folder: takes all layers; on a file system that overlays can lie on.
        arguments: as of --build-arg.
        mounted: files and folders of this machine that steps may read, and where they find them.
        environment: of the steps, besides what the Dockerfile says.
    """

    def __init__(
        self,
        dockerfile: Dockerfile,
        context: Path,
        folder: Path,
        arguments: dict[str, str],
        mounted: dict[Path, str],
        environment: dict[str, str],
    ) -> None:
        self._dockerfile = dockerfile
        self._context = context
        self._folder = folder
        self._given = arguments
        self._mounted = mounted
        self._environment = environment
        self._stages: dict[str, Layers] = {}

    def build(self, target: str) -> Layers:
        """Run all that a target needs.

        Raises:
            StepError: a step failed.
        """
        for stage in self._dockerfile.needed(target):
            layers = self._begin(stage)
            for number, instruction in enumerate(stage.instructions, 1):
                print(f"{stage.name} {number}: {instruction.name} {instruction.text}", flush=True)
                self._step(layers, instruction)
            self._stages[stage.name] = layers
        return self._stages[target]

    def run(self, target: str, user: str, command: str, binds: dict[Path, str]) -> str:
        """Run a command in what was built, its root read-only, and return what it printed.

        Args:
            user: UID:GID.
            binds: folders of this machine, and where they lie for the command.
        """
        layers = self._stages[target]
        lines = layers.mounts(self._place("mnt"), self._place("work"), read_only=True)
        lines += _binds(self._place("mnt"), binds)
        return self._enter(lines, command, layers.variables, user, self._folder_of(target))

    def _folder_of(self, target: str) -> str:
        return self._dockerfile.setting(target, "WORKDIR") or "/"

    def _place(self, name: str) -> Path:
        place = self._folder / name
        place.mkdir(parents=True, exist_ok=True)
        return place

    def _begin(self, stage: Stage) -> Layers:
        own = self._folder / "stages" / stage.name
        own.mkdir(parents=True)
        if stage.base in self._stages:
            base = self._stages[stage.base]
            return Layers([*base.below, base.own], own, dict(base.variables), base.folder)
        return Layers([debian_root(stage.base, self._folder)], own, {"PATH": PATH})

    def _step(self, layers: Layers, instruction: Instruction) -> None:
        match instruction.name:
            case "ENV":
                layers.variables |= instruction.assignments()
            case "ARG":
                given = {k: v for k, v in self._given.items() if k == _argument(instruction)}
                layers.variables |= instruction.assignments() | given
            case "WORKDIR":
                layers.folder = expand(instruction.text, layers.variables)
                self._mounted_shell(layers, [f"mkdir -p $root{layers.folder}"])
            case "COPY":
                self._copy(layers, instruction)
            case "RUN":
                place = self._place("mnt")
                lines = layers.mounts(place, self._place("work"))
                lines += _binds(place, self._mounted)
                variables = layers.variables | self._environment
                self._enter(lines, instruction.text, variables, "0:0", layers.folder)

    def _copy(self, layers: Layers, instruction: Instruction) -> None:
        stage, sources, destination = instruction.copied()
        inside = PurePosixPath(layers.folder) / destination
        lines = []
        for source in sources:
            # A folder's contents go into the destination; a file goes into it by its name.
            if stage:
                other, seen = self._stages[stage], self._place("from")
                lower = ":".join(map(str, (other.own, *reversed(other.below))))
                lines += [f"mount -t overlay overlay -o lowerdir={lower} {seen}"]
                at = seen / source.removeprefix("/")
                lines += [f"mkdir -p $root{inside}", f"cp -a {at}/. $root{inside}/"]
                continue
            at = self._context / source
            if ignores((self._context / ".dockerignore").read_text(), source):
                raise StepError(f"COPY {source}: .dockerignore keeps it out")
            if at.is_dir():
                lines += [f"mkdir -p $root{inside}", f"cp -a {at}/. $root{inside}/"]
            else:
                lines += [f"mkdir -p $root{inside}", f"cp {at} $root{inside}/"]
        self._mounted_shell(layers, lines)

    def _mounted_shell(self, layers: Layers, lines: list[str]) -> None:
        place = self._place("mnt")
        script = [*layers.mounts(place, self._place("work")), f"root={place}", *lines]
        _run(["unshare", "--mount", "--pid", "--fork", "sh", "-ec", "\n".join(script)])

    def _enter(
        self, lines: list[str], command: str, variables: dict[str, str], user: str, folder: str
    ) -> str:
        home = "/root" if user == "0:0" else "/home/disagg"
        given = [f"{name}={value}" for name, value in ({"HOME": home} | variables).items()]
        inside = f"cd {folder} && {command}"
        enter = ["chroot", f"--userspec={user}", str(self._place("mnt"))]
        entered = shlex.join([*enter, "/usr/bin/env", "-i", *given, "/bin/sh", "-ec", inside])
        script = "\n".join([*lines, f"exec {entered}"])
        return _run(["unshare", "--mount", "--pid", "--fork", "sh", "-ec", script])


def _binds(root: Path, mounted: dict[Path, str]) -> list[str]:
    """Shell commands that show files and folders of this machine in a root."""
    return [
        f"mkdir -p {root}{inside} && mount --bind {path} {root}{inside}"
        if path.is_dir()
        else f"touch {root}{inside} && mount --bind {path} {root}{inside}"
        for path, inside in mounted.items()
    ]


def _argument(instruction: Instruction) -> str:
    return instruction.text.partition("=")[0]


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STEP_BOUND_S,
    )
    if done.returncode:
        raise StepError(f"exit code {done.returncode}: {command}\n{done.stdout[-6000:]}")
    return done.stdout
