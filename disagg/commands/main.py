"""The `disagg` command: its subcommands and how it ends on a user's error."""

import errno
import inspect
import io
import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from disagg.commands.cache import app as cache
from disagg.commands.calibrate import calibrate
from disagg.commands.certificates import app as certificates
from disagg.commands.doctor import doctor
from disagg.commands.drain import drain
from disagg.commands.explain import explain
from disagg.commands.keys import app as keys
from disagg.commands.leases import leases
from disagg.commands.plan import plan_kv_memory
from disagg.commands.revisions import app as revisions
from disagg.commands.scale import scale
from disagg.commands.serve import router, serve, workers
from disagg.commands.show_config import show_config
from disagg.commands.simulate import simulate
from disagg.commands.status import status
from disagg.commands.top import top
from disagg.errors import DisaggError

USER_ERROR = 2
STDOUT = 1
STOPPING = ("strict", "surrogateescape")
"""What Python does, by the locale, at a sign that standard output lacks: both end the command."""

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=(
        "Prefill/decode disaggregation for hybrid-attention language models.\n\n"
        "[bold]Examples[/bold]\n\n"
        "  disagg serve --model ./my-model\n\n"
        "  disagg serve --model ./my-model --prefill 2 --set worker.num_blocks=4096\n\n"
        "  disagg config --config disagg.yaml\n\n"
        "Settings come from --config, then DISAGG_SECTION__KEY variables, then flags."
    ),
)

app.command()(serve)
app.command()(router)
app.command()(workers)
app.command()(scale)
app.command("config")(show_config)
app.command()(status)
app.command()(doctor)
app.command()(explain)
app.command()(top)
app.command()(leases)
app.command()(drain)
app.command("plan")(plan_kv_memory)
app.command()(calibrate)
app.command()(simulate)
app.add_typer(cache, name="cache")
app.add_typer(certificates, name="certificates")
app.add_typer(keys, name="keys")
app.add_typer(revisions, name="revisions")


def _flowing(text: str) -> str:
    """Each paragraph as one line, which a terminal breaks where it ends; indented ones stay."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(one if one[:1] == " " else one.replace("\n", " ") for one in paragraphs)


for each in (app, cache, certificates, keys, revisions):
    for command in each.registered_commands:
        command.help = _flowing(inspect.getdoc(command.callback) or "")


def main() -> None:
    """Entry point: user errors become one clear text and exit code 2, a full disk one and 1."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - closed by who called
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in STOPPING:
        sys.stdout.reconfigure(errors="backslashreplace")  # an old terminal lacks some signs
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where it may fail: not when the interpreter ends
    except DisaggError as error:
        print(f"disagg: {error.message}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # what is left is lost
        if error.errno == errno.ENOSPC:  # a reader that has left knows why
            where = error.filename or "standard output"
            print(f"disagg: {where}: {error.strerror}", file=sys.stderr)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if show_version:
        print(version("disagg"))
        raise typer.Exit()
