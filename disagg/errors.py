"""The one error tree of the project.

::

    DisaggError
    ├── RequestError          the caller's mistake; names the field (400)
    │   ├── DuplicateRequestError another live request has this id (409)
    │   ├── SupersededError       a later request with the same id is served (409)
    │   ├── ModelNotFoundError    no such model (404)
    │   └── ContextLengthError    prompt or prompt + max_tokens too long (400)
    ├── CapacityError         no room now; try again later (429)
    │   └── SloError              no plan keeps the time that the request wants (429)
    ├── RemoteFault           a worker or peer failed (503)
    │   ├── StoppingError         this router is about to end; another one may serve it (503)
    │   └── ProtocolError         a peer sent what the protocol forbids (502)
    ├── ExpiredError          a bound on waiting was reached (504)
    │   ├── ChargeLostError       another supervisor has taken over
    │   └── ClusterTokenError     a Ray cluster asks for another token
    ├── CancelledError        the client went away (499)
    ├── PlanError             planning the request failed by a bug, the others go on (500)
    └── ConfigError           settings, checkpoint or contract unusable (start-up)
        └── WorkerIdTakenError    another process lives under this worker id

``InvariantViolation`` stands outside the tree: it is a bug of ours and never caught, but where a
request is planned: nothing has changed by then.
"""

from typing import ClassVar


class DisaggError(Exception):
    """Base of everything disagg raises on purpose.

    Attributes:
        message: what happened and what to do, one sentence.
        request_id: the request it belongs to, "" when none.
        param: the request field or setting at fault, "" when none.
        retry_after_s: when the same request may succeed, as far as that is known; 0: unknown.
    """

    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"

    def __init__(
        self, message: str, *, param: str = "", request_id: str = "", retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.request_id = request_id
        self.retry_after_s = retry_after_s


class RequestError(DisaggError):
    """The caller's mistake; ``param`` names the field."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    code = "invalid_value"
    type = "invalid_request_error"


class DuplicateRequestError(RequestError):
    """A live request has this id, and it is another request."""

    http_status = 409
    grpc_status = "ALREADY_EXISTS"
    code = "duplicate_request_id"


class ModelNotFoundError(RequestError):
    """The request names a model that is not served here."""

    http_status = 404
    grpc_status = "NOT_FOUND"
    code = "model_not_found"


class SupersededError(RequestError):
    """A later request with the same id is served in place of this one."""

    http_status = 409
    grpc_status = "ABORTED"
    code = "superseded"


class ContextLengthError(RequestError):
    """Prompt, or prompt + max_tokens, exceeds what the model or the pools can hold."""

    code = "context_length_exceeded"


class CapacityError(DisaggError):
    """No room at present; the same request may succeed later."""

    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    code = "rate_limit_exceeded"
    type = "rate_limit_error"


class SloError(CapacityError):
    """No plan has the first token come as soon as the request, or the deployment, wants it."""

    code = "slo_unattainable"


class RemoteFault(DisaggError):
    """A worker or a peer failed and the request could not be continued elsewhere."""

    http_status = 503
    grpc_status = "UNAVAILABLE"
    code = "worker_unavailable"


class StoppingError(RemoteFault):
    """This router is about to end; another replica may serve the request."""

    code = "router_stopping"

    def __init__(self, *, request_id: str = "") -> None:
        super().__init__("the router is stopping", request_id=request_id, retry_after_s=1)


class ProtocolError(RemoteFault):
    """A peer sent something the protocol forbids."""

    http_status = 502
    code = "protocol_error"


class ExpiredError(DisaggError):
    """A bound on waiting was reached."""

    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    code = "timeout"


class ChargeLostError(ExpiredError):
    """Another supervisor has taken over, as this one had not renewed its claim."""


class ClusterTokenError(ExpiredError):
    """A Ray cluster asks for a token that is missing, or for another one."""


class CancelledError(DisaggError):
    """The client went away; nobody reads the answer."""

    http_status = 499
    grpc_status = "CANCELLED"
    code = "cancelled"


class PlanError(DisaggError):
    """A bug of ours, or of a policy, while one request was planned; its cause says which."""


class ConfigError(DisaggError):
    """Settings, a checkpoint or a contract cannot be used; raised at start-up."""

    grpc_status = "FAILED_PRECONDITION"
    code = "config_error"


class WorkerIdTakenError(ConfigError):
    """A worker registers under an id that another process has; that one goes on."""

    grpc_status = "ALREADY_EXISTS"
    code = "worker_id_taken"


class InvariantViolation(AssertionError):
    """A bug of ours: an invariant of the design does not hold."""
