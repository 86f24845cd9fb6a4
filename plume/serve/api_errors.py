"""Every error in the shape that OpenAI's clients read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from plume.config import UserError
from plume.inference.sequences import ContextLengthError
from plume.serve.scheduler import Busy, Closed, TimedOut
from plume.serve.schemas import printable

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
TYPES = ("bool", "dict", "float", "int", "str")  # in pydantic's places of errors, beside names with brackets or dashes


class ApiError(HTTPException):  # one of fastapi's, which it lets through while it reads a body
    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers=dict(headers or {}))
        self.status, self.message, self.code = status, printable(message), code
        self.param = None if param is None else printable(param)

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def as_api_error(error: Exception) -> ApiError:
    """The answer to any exception; a defect shows no details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return busy(str(error), error.retry_after)
    if isinstance(error, TimedOut):
        return ApiError(408, str(error), code="timeout")
    if isinstance(error, Closed):
        return ApiError(503, str(error), code="closed", headers={"Retry-After": "1"})
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, RequestValidationError):
        return invalid(error)
    if isinstance(error, AnyHTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    return ApiError(500, "internal error; the server's log has the traceback", code="internal_error")


def busy(message: str, seconds: float) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(max(1, math.ceil(seconds)))})


def invalid(error: RequestValidationError) -> ApiError:
    """The first problem of a body, with its field; where a value may be of several types, what is wrong in one."""
    found = error.errors()
    first = next((e for e in found if not e["type"].endswith("_type")), found[0])
    parts = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    place = [part for part in parts if (part.isidentifier() or part.isdigit()) and part not in TYPES]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', '')}", code="invalid_json")
    name = (first.get("ctx") or {}).get("field", place[0] if place else None)
    message = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{'.'.join(place)}: {message}" if place else message, param=name)


def install(app: FastAPI) -> None:
    async def handle(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    for kind in (ApiError, Busy, Closed, TimedOut, UserError, RequestValidationError, AnyHTTPException):
        app.add_exception_handler(kind, handle)
