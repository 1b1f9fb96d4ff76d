"""Log lines to a pipe that nobody reads."""

import io
import logging
import os
from collections.abc import Iterator

import pytest

from disagg.telemetry.log_stream import LogStream, LogStreamHandler


@pytest.fixture
def pipe() -> Iterator[tuple[int, io.TextIOWrapper]]:
    read, write = os.pipe()
    with open(write, "w") as stream:
        yield read, stream
    os.close(read)


def fill(stream: io.TextIOWrapper) -> int:
    """Until it takes nothing more; the number of bytes."""
    os.set_blocking(stream.fileno(), False)
    taken = 0
    try:
        while True:
            taken += os.write(stream.fileno(), b"." * 1024)
    except BlockingIOError:
        os.set_blocking(stream.fileno(), True)
        return taken


@pytest.mark.timeout(60)
def test_lines_that_nobody_reads_are_left_out_and_counted(
    pipe: tuple[int, io.TextIOWrapper],
) -> None:
    read, stream = pipe
    lines = LogStream(stream)
    lines.write_line("first")
    assert os.read(read, 100) == b"first\n"
    taken = fill(stream)
    lines.write_line("second")
    lines.write_line("third")
    assert os.read(read, 2 * taken) == b"." * taken
    lines.write_line("fourth")
    lines.write_line("fifth")
    expected = b"(2 lines left out: nobody read them)\nfourth\nfifth\n"
    assert os.read(read, 2 * taken) == expected


@pytest.mark.timeout(60)
def test_log_records_likewise(pipe: tuple[int, io.TextIOWrapper]) -> None:
    read, stream = pipe
    handler = LogStreamHandler(stream)
    record = logging.makeLogRecord({"msg": "a record"})
    taken = fill(stream)
    handler.handle(record)
    assert os.read(read, 2 * taken) == b"." * taken
    handler.handle(record)
    assert os.read(read, 2 * taken).endswith(b"\na record\n")


def test_what_is_no_file_takes_every_line() -> None:
    stream = io.StringIO()
    LogStream(stream).write_line("a line")
    assert stream.getvalue() == "a line\n"
