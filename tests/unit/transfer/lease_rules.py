"""Rules taken away from a single lease's tables."""

from disagg.checking.explorer.ranks_world import RanksWorld
from disagg.checking.explorer.worlds import LEASE_SETTINGS
from tests.unit.transfer import mutants
from tests.unit.transfer.taken_away import TakenAway, lease_without

LEASE_RULES = (
    lease_without(
        "a commit is sent only when every READ is DONE",
        "lease",
        8,
        "arrives: O0 -> R0 CommitAnswer: valid with wrong bytes",
        inbound=mutants.CommitBeforeDone,
    ),
    TakenAway(
        "a READ has ended when the last rank's handle has",
        "`waits_for=1`",
        "`lease-ranks`",
        RanksWorld(LEASE_SETTINGS["lease-ranks"], waits_for=1).explore,
        7,
        "READ 1, rank 1 lands: block 0 is now 'nothing | KV 0': "
        "a READ lands in block 0, which nobody holds",
    ),
    lease_without(
        "destinations are held until every READ is terminal",
        "lease",
        6,
        "READ 1 lands: block 0 is now 'KV 0': a READ lands in block 0, which nobody holds",
        inbound=mutants.DestinationsDroppedAtAbort,
        stuck=False,
    ),
    lease_without(
        "an OK counts for the current attempt only",
        "lease-retry",
        24,
        "arrives: O0 -> R0 CommitAnswer: valid with wrong bytes",
        inbound=mutants.OldAttemptAccepted,
    ),
    lease_without(
        "a commit names its reader's epoch",
        "lease-reader-restarts",
        20,
        "arrives: O0 -> R0 CommitAnswer: valid with wrong bytes",
        "the owner's look at who commits, addressee epochs",
        leases=mutants.AnyReaderAccepted,
        inbound=mutants.AttemptWithoutEpoch,
        checks_addressee=False,
    ),
    lease_without(
        "an OK is believed from the owner's epoch only",
        "lease-owner-restarts",
        16,
        "arrives: O1 -> R0 CommitAnswer: valid with wrong bytes",
        "addressee epochs",
        inbound=mutants.AnySenderAccepted,
        checks_addressee=False,
    ),
    lease_without(
        "the seal says how many ranges there are",
        "lease",
        8,
        "arrives: O0 -> R0 CommitAnswer: valid with wrong bytes",
        "counts in the commit, numbers of offers",
        leases=mutants.CommitWithoutCountsOwner,
        inbound=mutants.CommitWithoutCountsReader,
    ),
    lease_without(
        "an offer is made with a hold",
        "lease",
        11,
        "arrives: O0 -> R0 CommitAnswer: valid with wrong bytes",
        leases=mutants.OfferWithoutHold,
    ),
    lease_without(
        "a lease is dead before its blocks are reused",
        "lease",
        11,
        "arrives: O0 -> R0 CommitAnswer: valid with wrong bytes",
        leases=mutants.ReusedBeforeDead,
    ),
    lease_without(
        "an unknown lease answers NO",
        "lease",
        12,
        "arrives: O0 -> R0 CommitAnswer: valid with wrong bytes",
        leases=mutants.UnknownLeaseSaysOk,
    ),
    lease_without(
        "a READ's error is no success",
        "lease",
        11,
        "arrives: O0 -> R0 CommitAnswer: valid with wrong bytes",
        inbound=mutants.ReadErrorsIgnored,
    ),
    lease_without(
        "what arrived beside READ errors is right only after the commit",
        "lease",
        10,
        "READ 2 ends with an error: valid with wrong bytes",
        inbound=mutants.PartlyRightBeforeCommit,
    ),
    lease_without(
        "the commit ends the owner's hold",
        "lease",
        10,
        "arrives: R0 -> O0 Commit: nothing leads to a good end any more",
        leases=mutants.HoldKeptAfterCommit,
    ),
    lease_without(
        "the last READ's end ends the reader's hold",
        "lease",
        5,
        "reader aborts: nothing leads to a good end any more",
        inbound=mutants.HoldKeptAfterDraining,
    ),
    lease_without(
        "commits and questions are repeated until they are answered",
        "lease-lossy",
        5,
        "lost: O0 -> R0 Offers: nothing leads to a good end any more",
        repeats=False,
    ),
)
