"""Named errors. Each carries its own HTTP meaning, so the server needs one handler.

AgentSpecError
├── ConfigError              a setting is wrong; names the setting and the value
├── ModelError               a model cannot be fetched, converted or loaded
├── KernelError              a kernel was given what it cannot compute
├── TraceError               a trajectory file cannot be read; names file and line
├── StoreError               stored histories cannot be read or written; names the place
├── ReplayError              a replayed server answered wrongly or not at all
├── InvalidRequest      400  the request is malformed or asks for what is not supported
│   ├── ContextTooLong  400  the prompt does not fit the model's window
│   └── UnsupportedParameter  400  a known option that nothing here can honour
├── UnknownModel        404  another model than the served one was asked for
├── NotFound            404  no such route or object
├── MethodNotAllowed    405  the route exists, the method does not
├── RequestTimeout      408  the request does not arrive in time
├── BodyTooLarge        413  the body is over the limit
├── Overloaded          429  the queue is full; retry later
├── HeadersTooLarge     431  the headers are over the limit
├── InternalError       500  a fault of ours; the message says nothing about its inside
└── Unavailable         503  the worker is starting, stopping or gone
"""


class AgentSpecError(Exception):
    """Base of every error that AgentSpec raises on purpose."""

    status = 500
    type = "server_error"
    code: str | None = None
    retry_after: int | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(AgentSpecError):
    """A setting is wrong."""


class ModelError(AgentSpecError):
    """A model cannot be fetched, converted or loaded."""


class KernelError(AgentSpecError):
    """A kernel was given what it cannot compute."""


class TraceError(AgentSpecError):
    """A trajectory file cannot be read."""


class StoreError(AgentSpecError):
    """Stored histories cannot be read or written by a command."""


class ReplayError(AgentSpecError):
    """A replayed server answered wrongly or not at all."""


class InvalidRequest(AgentSpecError):
    """The request is malformed or asks for what is not supported."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class ContextTooLong(InvalidRequest):
    """The prompt does not fit the model's window."""

    code = "context_length_exceeded"


class UnsupportedParameter(InvalidRequest):
    """A known option that nothing here can honour; refused rather than ignored."""

    code = "unsupported_parameter"


class UnknownModel(AgentSpecError):
    """Another model than the served one was asked for."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class NotFound(AgentSpecError):
    """No such route or object."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(AgentSpecError):
    """The route exists, the method does not."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeout(AgentSpecError):
    """The request does not arrive in time; the connection is closed after the answer."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class BodyTooLarge(AgentSpecError):
    """The body is over the limit."""

    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class Overloaded(AgentSpecError):
    """The queue is full; retry later."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"
    retry_after = 1


class HeadersTooLarge(AgentSpecError):
    """The headers are over the limit."""

    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class InternalError(AgentSpecError):
    """A fault of ours; the message says nothing about its inside."""

    code = "internal_error"


class Unavailable(AgentSpecError):
    """The worker is starting, stopping or gone."""

    status = 503
    type = "service_unavailable_error"
    code = "unavailable"
    retry_after = 5
