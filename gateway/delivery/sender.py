"""Sends batches to the receiver of one subscription, and says what became of each attempt.

* Any 2xx is done. 408, 425, 429, 5xx and no answer: again. Every other status is a rejection, redirects too: they are
  not followed, since nobody has allowed where they lead.
* A connection is made only to an address that is allowed, whatever the name resolves to at that moment. Proxies of the
  environment are not used.
* Keys, tokens and certificates are read again when their files change.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, AbstractStreamWriter, ResolveResult
from aiohttp.http_writer import StreamWriter
from aiohttp.resolver import ThreadedResolver
from logferry.gateway.contract.delivery_state import UnitKey
from logferry.gateway.contract.names import visible
from logferry.gateway.delivery.batch import BatchShape, DeliveryBatch, headers
from logferry.gateway.subscriptions import AllowedAddresses, PushSubscription

_AGAIN: Final = (408, 425, 429)
_FIRST_S: Final = 0.5
_LONGEST_S: Final = 60.0
_LONGEST_ASKED_S: Final = 3600.0
_DETAIL_BYTES: Final = 2048
_INLINE_BYTES: Final = 1 << 15


class DeliveryOutcome(NamedTuple):
    """``after_s``: when the receiver asks to be tried again."""

    kind: Literal["done", "again", "rejected"]
    detail: str = ""
    after_s: float | None = None


class _Body(aiohttp.Payload):
    """Written in its pieces, as they are. aiohttp joins them, and copies them behind the headers, otherwise."""

    _autoclose = True

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__(pieces)
        self._size = sum(map(len, pieces))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        writer.send_headers()
        for piece in self._value:
            await cast("StreamWriter", writer).write(piece, drain=False)
        await writer.drain()


class ForbiddenAddress(OSError):
    """The receiver's address is not one that may be connected to."""


class _CheckedResolver(AbstractResolver):
    def __init__(self, allowed: AllowedAddresses) -> None:
        self._allowed, self._resolver = allowed, ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        good = [one for one in found if one["host"] in self._allowed]
        if not good:
            raise forbidden(host, found[0]["host"])
        return good

    async def close(self) -> None:
        await self._resolver.close()


def forbidden(host: str, address: str) -> ForbiddenAddress:
    return ForbiddenAddress(f"{host} is {address}, which is not public; allow it by allowed_networks of deliver")


class BatchSender:
    """The connections to one receiver. ``secrets``: the folder of the files that the subscription names."""

    def __init__(self, definition: PushSubscription, secrets: Path | None, allowed: AllowedAddresses) -> None:
        self._definition, self._secrets, self._allowed = definition, secrets, allowed
        self._host = urlsplit(definition.url).hostname or ""
        self._session: aiohttp.ClientSession | None = None
        self._tls: tuple[tuple[float, ...], ssl.SSLContext] | None = None
        self._closed = False
        self.in_flight = asyncio.Semaphore(definition.max_in_flight)

    async def close(self) -> None:
        """What is under way, or begins later, is an attempt that failed."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def attempt(
        self, key: UnitKey, batch: DeliveryBatch, shape: BatchShape, epoch: int, replay: int
    ) -> DeliveryOutcome:
        """Sends the batch once."""
        try:
            self._check_literal()
            keys, is_plain = self._keys(), shape.compression == "none"

            def prepared() -> tuple[list[bytes], dict[str, str]]:
                """Both take some ms for each MiB."""
                sent = headers(key, batch, shape, epoch=epoch, replay=replay, secrets=keys, now_s=int(time.time()))
                return batch.pieces if is_plain else [shape.compressed(b"".join(batch.pieces))], sent

            inline = batch.size_bytes <= _INLINE_BYTES or (is_plain and not keys)
            body, sent = prepared() if inline else await asyncio.to_thread(prepared)
            if (token := self._definition.token_file) is not None:
                sent["Authorization"] = f"Bearer {self._read(token).decode()}"
            return await self._post(body, sent, self._context())
        except TimeoutError:
            return DeliveryOutcome("again", f"no answer within {self._definition.timeout_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError, ssl.SSLError) as error:
            # aiohttp tells of what a resolver raised by its cause.
            cause: BaseException = error
            while cause.__cause__ is not None and not isinstance(cause, ForbiddenAddress):
                cause = cause.__cause__
            named = cause if isinstance(cause, ForbiddenAddress) else error
            return DeliveryOutcome("again", str(named) or type(named).__name__)

    async def _post(self, body: list[bytes], sent: dict[str, str], context: ssl.SSLContext | None) -> DeliveryOutcome:
        if self._closed:
            raise aiohttp.ClientConnectionError("the subscription was changed or removed")
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=self._definition.max_in_flight, resolver=_CheckedResolver(self._allowed), ttl_dns_cache=10
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=self._definition.timeout_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": "logferry-deliver"},
                trust_env=False,
                auto_decompress=False,
            )
        options: dict[str, Any] = {} if context is None else {"ssl": context}
        async with self._session.post(
            self._definition.url, data=_Body(body), headers=sent, allow_redirects=False, **options
        ) as answer:
            detail = await answer.content.read(_DETAIL_BYTES)
            return judged(answer.status, answer.headers.get("Retry-After"), detail, time.time())

    def _check_literal(self) -> None:
        """aiohttp asks no resolver for what looks like an address, `127.1` and `2130706433` among it."""
        if ":" not in self._host and not self._host.replace(".", "").isdigit():
            return
        try:
            is_allowed = self._host in self._allowed
        except ValueError:
            is_allowed = False
        if not is_allowed:
            raise forbidden(self._host, self._host)

    # ---- files -----------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> Path:
        if self._secrets is None:
            raise ValueError(f"{name}: the configuration of deliver has no secrets_dir")
        return self._secrets / name

    def _read(self, name: str) -> bytes:
        try:
            found = self._path(name).read_bytes().strip()
        except OSError as error:
            raise ValueError(f"{name} in secrets_dir cannot be read: {error.strerror}") from None
        if not found or not found.isascii() or b"\n" in found:
            raise ValueError(f"{name} in secrets_dir must hold one line of ASCII")
        return found

    def _keys(self) -> list[bytes]:
        names = (self._definition.secret_file, self._definition.old_secret_file)
        return [self._read(name) for name in names if name is not None]

    def _context(self) -> ssl.SSLContext | None:
        names = [name for name in (self._definition.ca_file, self._definition.cert_file) if name is not None]
        if not names:
            return None
        try:
            stamp = tuple(self._path(name).stat().st_mtime for name in names)
        except OSError as error:
            raise ValueError(f"{names} in secrets_dir: {error.strerror}") from None
        if self._tls is None or self._tls[0] != stamp:
            ca, cert = self._definition.ca_file, self._definition.cert_file
            context = ssl.create_default_context(cafile=None if ca is None else str(self._path(ca)))
            if cert is not None:
                context.load_cert_chain(self._path(cert))
            self._tls = stamp, context
        return self._tls[1]


def judged(status: int, retry_after: str | None, detail: bytes, now_s: float) -> DeliveryOutcome:
    """What an answer means."""
    if 200 <= status < 300:
        return DeliveryOutcome("done")
    said = visible(detail.decode("utf-8", "replace").strip())
    text = f"status {status}" + (f": {said}" if said else "")
    if status in _AGAIN or status >= 500:
        return DeliveryOutcome("again", text, _asked_s(retry_after, now_s))
    if 300 <= status < 400:
        text += "; redirects are not followed"
    return DeliveryOutcome("rejected", text)


def _asked_s(retry_after: str | None, now_s: float) -> float | None:
    """Seconds, or a date (RFC 9110, section 10.2.3); what is neither counts for nothing."""
    if retry_after is None:
        return None
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return float(min(int(text[:9]), _LONGEST_ASKED_S))
    try:
        return max(0.0, min(parsedate_to_datetime(text).timestamp() - now_s, _LONGEST_ASKED_S))
    except (ValueError, TypeError, OverflowError):
        return None


def backoff_s(failures: int, asked_s: float | None) -> float:
    """How long to wait after so many failures in a row, with jitter: receivers are not hit by all at once."""
    longest = min(_LONGEST_S, _FIRST_S * 2 ** min(failures - 1, 20))
    return max(asked_s or 0.0, random.uniform(longest / 2, longest))
