"""`disagg certificates`: the cluster's authority, and certificates for its nodes and clients."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from disagg.errors import ConfigError
from disagg.tls.authority import CA_KEY_FILE, CLIENT, NODE, create_certificates
from disagg.tls.certificate_files import (
    CLIENT_NAME,
    NODE_NAME,
    expiry_warning,
    read_certificate,
)

DAYS = 365

app = typer.Typer(no_args_is_help=True, help="Certificates of routers, workers and gRPC clients.")

Directory = Annotated[Path, typer.Option("--directory", help="Private to whoever runs this.")]


@app.command()
def create(
    directory: Directory,
    days: Annotated[
        int, typer.Option("--days", min=1, max=3650, help="Validity of what is issued.")
    ] = DAYS,
) -> None:
    """Issue certificates for all nodes and for gRPC clients; make the authority if there is none.

    Called again, it issues new ones of the same authority: processes take them without a restart.
    """
    try:
        nodes, clients = create_certificates(directory, days, datetime.now(UTC))
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}", param="--directory") from error
    print(
        f"{nodes}: for every router and worker. Hosts: copy it to the same path everywhere and\n"
        f"  set cluster.tls_directory to that. Kubernetes:\n"
        f"  kubectl create secret generic disagg-tls --from-file={nodes}\n"
        f"{clients}: for programs that call Generate and Match over gRPC\n"
        f"{directory / CA_KEY_FILE}: issues more; keep it here or offline, on no node\n"
        f"valid for {days} days; the same command renews them"
    )


@app.command()
def check(directory: Directory) -> None:
    """Check a directory as a router or worker would, and say until when it is valid.

    Of the one that was given to create both that it has made in there.
    """
    now = datetime.now(UTC)
    made = [folder for name in (NODE, CLIENT) if (folder := directory / name).is_dir()]
    for folder in made or [directory]:
        certificate = read_certificate(folder, (NODE_NAME, CLIENT_NAME), now)
        print(f"{folder}: valid until {certificate.not_after:%Y-%m-%d %H:%M} UTC")
        if warning := expiry_warning(certificate, now):
            print(f"{folder}: {warning}")
