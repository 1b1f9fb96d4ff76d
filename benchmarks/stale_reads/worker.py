"""A worker of ours whose commit check can be taken out: the benchmark's own control."""

from disagg.messages.identity import Incarnation
from disagg.messages.peer import Commit, CommitAnswer
from disagg.transfer.actions import Send
from tests.process.worker_main import WorkerUnderTest, main

NO_COMMIT = "confirm unknown"


def confirm(sender: Incarnation, commit: Commit) -> Send:
    """In the place of the refusal that a commit of a lease that is over gets."""
    return Send(sender, CommitAnswer(commit.key, commit.lease_id, commit.attempt, True, ""))


class WorkerWithoutCommit(WorkerUnderTest):
    """A gated worker with one command more: ``confirm unknown``."""

    def command(self, line: str) -> None:
        """Carry out a line of standard input."""
        if line == NO_COMMIT:
            self.on_loop(self.confirm_unknown)
            print(f"ok {line}", flush=True)
        else:
            super().command(line)

    def confirm_unknown(self) -> None:
        """From now on confirm every commit."""
        assert self.worker.control is not None
        leases = self.worker.control.core.leases
        leases._unknown_lease = confirm  # type: ignore[method-assign]


if __name__ == "__main__":
    main(WorkerWithoutCommit)
