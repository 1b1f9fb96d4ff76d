"""Two nodes in processes of their own, and the pull of a request from one to the other."""

import itertools
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from benchmarks.transfer.marks import Marks
from benchmarks.transfer.node import serve
from benchmarks.transfer.plan import NodePlan
from disagg.messages.submit import Role

START_S = 120.0
ANSWER_S = 300.0


class Remote:
    """A node in another process; every wait is bounded."""

    def __init__(self, plan: NodePlan) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = plan.name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(plan, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of `Node` and wait for its result."""
        self.begin(method, **arguments)
        return self.answer()

    def begin(self, method: str, **arguments: Any) -> None:
        """Call without waiting; `answer` must follow before the next call."""
        self._pipe.send((method, arguments))

    def answer(self, wait_s: float = ANSWER_S) -> Any:
        """Wait for what the last call returns."""
        if not self._pipe.poll(wait_s):
            raise RuntimeError(f"{self.name} gives no answer for {wait_s} s")
        ok, value = self._pipe.recv()
        if not ok:
            raise RuntimeError(value)
        return value

    def end(self) -> None:
        """Stop the process, by force if it does not listen."""
        try:
            self.call("stop")
            self._process.join(10)
        except (RuntimeError, OSError, EOFError):
            pass
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@dataclass(frozen=True)
class Pull:
    """One finished pull.

    Attributes:
        owner: what was noted at the owner.
        reader: and at the reader.
        reads: of all READs of the pull.
        num_blocks: pulled, and found right.
    """

    owner: Marks
    reader: Marks
    reads: Marks
    num_blocks: int

    @property
    def reads_s(self) -> float:
        """Seconds from the first READ posted to the end of the last one."""
        return self.reads.last["done"] - self.reads.first["posted"]

    @property
    def seal_to_commit_s(self) -> float:
        """From the seal that leaves the owner to the commit's confirmation at the reader."""
        return self.reader.first["committed"] - self.owner.last["seal sent"]

    @property
    def exposed_s(self) -> float:
        """From the end of the last prefill step to the begin of the first decode step."""
        return self.reader.first["step begins"] - self.owner.last["step ended"]


class Pair:
    """An owner and a reader; ends both processes when left.

    Args:
        plan: of both, but for the name.
        tls: value of UCX_TLS; "" leaves the choice to UCX (shared memory here).
        reader: changes for the reader alone.
    """

    def __init__(self, plan: NodePlan, tls: str = "", **reader: Any) -> None:
        self._numbers = itertools.count(1)
        before = {name: os.environ.get(name) for name in ("UCX_TLS", "OMP_NUM_THREADS")}
        os.environ.pop("UCX_TLS", None)
        os.environ.update({"OMP_NUM_THREADS": "1"} | ({"UCX_TLS": tls} if tls else {}))
        self.remotes: list[Remote] = []
        try:
            for one in (replace(plan, name="owner"), replace(plan, name="reader", **reader)):
                self.remotes.append(Remote(one))
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
        self.owner, self.reader = self.remotes
        try:
            self._owner_address = self.owner.answer(START_S)
            self._reader_address = self.reader.answer(START_S)
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> "Pair":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """End both processes."""
        for remote in self.remotes:
            remote.end()

    def new_number(self) -> int:
        """A number that no request of this pair had."""
        return next(self._numbers)

    def pull(self, num_tokens: int, *, decode: bool = False, check: bool = True) -> Pull:
        """Hand a prompt over: reserve, prefill, offers, READs, commit.

        Args:
            num_tokens: of the prompt.
            decode: wait also for the first decode step.
            check: compare what was pulled with what was written.
        """
        number, max_tokens = self.new_number(), 2 if decode else 1
        request = {"number": number, "num_tokens": num_tokens, "max_tokens": max_tokens + 1}
        self.reader.call("submit", role=Role.DECODE, peer=self._owner_address, **request)
        self.owner.call("submit", role=Role.PREFILL, peer=self._reader_address, **request)
        self.reader.call("wait_decodable" if decode else "wait_ended", number=number)
        pull = Pull(
            self.owner.call("take_marks", number=number),
            self.reader.call("take_marks", number=number),
            self.reader.call("take_reads"),
            self.checked(number) if check else 0,
        )
        self.reader.call("cancel", number=number)
        return pull

    def checked(self, number: int) -> int:
        """How many blocks a request pulled; an error if one of them is wrong."""
        wrong, total = self.reader.call("num_wrong_blocks", number=number)
        if wrong or not total:
            raise RuntimeError(f"{wrong} of {total} pulled blocks are wrong: nothing was measured")
        return int(total)

    def extra(self, remote: Remote, make: Callable[[Any], Any], call: str, **arguments: Any) -> Any:
        """Call a helper object beside a node."""
        return remote.call("extra", make=make, call=call, arguments=arguments)
