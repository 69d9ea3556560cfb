"""A handler that fails: the worker answers, and its log has what it takes to find the request."""

from __future__ import annotations

import json

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from logferry.gateway.config import Config
from logferry.gateway.http.auth import Gate, Right
from logferry.gateway.http.router import Call, Routes

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(("sent", "logged"), [(TRACE, TRACE), ("nonsense\u00e9", None), (None, None)])
async def test_the_line_of_a_failed_request_has_its_trace(
    sent: str | None, logged: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fails(_: Call) -> web.StreamResponse:
        raise ArithmeticError("broken")

    routes = Routes(Gate(Config.model_validate({"dc": "dc1", "kafka": {"bootstrap_servers": "127.0.0.1:1"}})))
    routes.add("GET", "/v1/broken", "broken", fails, Right.OPEN)
    headers = {} if sent is None else {"traceparent": sent}
    answer = await routes(make_mocked_request("GET", "/v1/broken", headers=headers))
    assert answer.status == 500
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["path"], line["traceparent"]) == ("request_failed", "/v1/broken", logged)
    assert "ArithmeticError" in line["error"]
