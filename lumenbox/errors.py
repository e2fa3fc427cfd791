"""Every error that lumenbox raises on purpose.

    LumenboxError
    ├── StartupError      `up` cannot start; one line that says what to do            exit 1
    │   └── ModelError    the model is missing, broken or of a kind we refuse         exit 1
    ├── NotRunning        no box in this run directory                                exit 3
    ├── TimedOut          a verb outlasted its --wait                                 exit 5
    └── RequestError      one HTTP request is refused; carries what its client sees

Broken invariants are asserts, not errors: nobody can do anything about them but fix the code.
"""

from __future__ import annotations


class LumenboxError(Exception):
    """Base of all; the command line prints its message as one line and exits with `exit_code`."""

    exit_code = 1


class StartupError(LumenboxError):
    """`lumenbox up` cannot start; the message names the cause and what to do."""


class ModelError(StartupError):
    """A model that is missing, incomplete, damaged, or of a kind that lumenbox refuses; the message names the file."""


class NotRunning(LumenboxError):
    """No coordinator answers in the run directory."""

    exit_code = 3


class TimedOut(LumenboxError):
    """A verb waited as long as it was allowed to."""

    exit_code = 5


class RequestError(LumenboxError):
    """One request is refused before its first byte, or its stream ends in an error event.

    `status` is the HTTP status, `code` the machine-readable string of CONTRACT §3, `param` the field at fault,
    `retry_after_s` goes into the Retry-After header of 429 and 503.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """OpenAI's coarse class of the error."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"
