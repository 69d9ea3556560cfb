"""The HTTP client of the commands: gateway URL, token and certificate authorities from the options."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Final

from logferry.client.transport.cluster import bearer, read_token
from logferry.gateway.contract.names import check_token, check_url
from logferry.ops.cli.problems import CommandError, Unavailable, UsageError

TOKEN_VARIABLE: Final = "LOGFERRY_TOKEN"
_TIMEOUT_S: Final = 60.0
_REDIRECTS: Final = (http.client.TEMPORARY_REDIRECT, http.client.PERMANENT_REDIRECT)


class RequestRefused(CommandError):
    """The gateway answered with a problem document. ``kind``: the last segment of its type."""

    def __init__(self, status: int, document: dict[str, Any]) -> None:
        self.status = status
        self.kind = str(document.get("type", "")).rpartition("/")[2]
        text = str(document.get("detail") or document.get("title") or f"the gateway answered with status {status}")
        if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            text += f"; pass a token with --token-file or the environment variable {TOKEN_VARIABLE}"
        super().__init__(text)
        if status in (http.client.BAD_REQUEST, http.client.UNAUTHORIZED):
            self.exit_status = UsageError.exit_status
        elif status >= http.client.INTERNAL_SERVER_ERROR:
            self.exit_status = Unavailable.exit_status


class Redirected(CommandError):
    """Another worker has what was asked for: the request belongs to ``location``. It is not followed here."""

    def __init__(self, url: str, location: str) -> None:
        self.location = location
        super().__init__(f"{url} names another worker: {location}; check --url")


def no_gateway(url: str, why: object, service: str = "gateway") -> Unavailable:
    return Unavailable(f"no {service} answers at {url}: {why}; start one (logferry up) or pass another URL")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """urllib would send the token on to any host that a redirect names."""

    def redirect_request(self, *_args: Any, **_more: Any) -> None:
        return None


class GatewayClient:
    """One worker of a gateway, or of the ``service`` that errors name. ``ca_file``: authorities that verify its
    certificate; None: those of the system."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        ca_file: str | None = None,
        timeout_s: float = _TIMEOUT_S,
        service: str = "gateway",
    ) -> None:
        """Raises UsageError."""
        try:
            check_url(url, "--url:")
        except ValueError as error:
            raise UsageError(str(error)) from None
        self.url, self.is_encrypted = url.rstrip("/"), url.lower().startswith("https:")
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers |= bearer(token, self.url)
        try:
            context = ssl.create_default_context(cafile=ca_file)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"--ca-file {ca_file}: {getattr(error, 'strerror', None) or error}") from None
        self._opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=context))
        self._timeout_s, self._service = timeout_s, service

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON document of the answer. Raises RequestRefused, Redirected, and Unavailable when none answers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers, method=method)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                return self._document(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                if error.code in _REDIRECTS and (location := error.headers.get("Location")):
                    raise Redirected(self.url, urllib.parse.urljoin(request.full_url, location)) from None
                raise RequestRefused(error.code, self._document(error.read())) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise no_gateway(self.url, reason, self._service) from None

    def _document(self, raw: bytes) -> dict[str, Any]:
        try:
            document = json.loads(raw)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise Unavailable(f"the server at {self.url} is not a {self._service}; check --url")
        return document


def add_gateway_options(
    parser: argparse.ArgumentParser, url_help: str = "URL of any gateway worker", url: str = "http://127.0.0.1:8080"
) -> list[argparse.Action]:
    """Adds ``--url``, ``--token-file`` and ``--ca-file``."""
    token_help = f"file with the token (default: the environment variable {TOKEN_VARIABLE})"
    return [
        parser.add_argument("--url", default=url, help=f"{url_help} (default: %(default)s)"),
        parser.add_argument("--token-file", metavar="FILE", help=token_help),
        parser.add_argument(
            "--ca-file", metavar="FILE", help="authorities that verify its certificate (default: the system's)"
        ),
    ]


def token_of(args: argparse.Namespace) -> str | None:
    """The token from the options or the environment. Raises UsageError."""
    try:
        if args.token_file is not None:
            return read_token(args.token_file)
        given = os.environ.get(TOKEN_VARIABLE)
        return check_token(given, TOKEN_VARIABLE) if given else None
    except ValueError as error:
        raise UsageError(str(error)) from None
