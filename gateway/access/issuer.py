"""An issuer of JSON Web Tokens: its keys, and the verification of a token by them.

* Keys are fetched when a token has one that is not known, at most once in `_RETRY_S`, whatever is sent; and in the
  background once they are older than `_REFRESH_S`. Requests that need them wait for the one fetch that is under way.
* While the issuer does not answer, the keys that it gave last are used, up to ``keys_max_age_s``. A key that it no
  longer gives is not used any more, and what was verified with it is verified again.
"""

from __future__ import annotations

import asyncio
import json
import math
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NoReturn

import aiohttp
from logferry.gateway import log
from logferry.gateway.access.claims import ALGORITHMS, UnverifiedToken, refused, verified_claims
from logferry.gateway.access.settings import IssuerSettings, check_fetchable
from logferry.gateway.config import ConfigError
from logferry.gateway.errors import Problem
from logferry.gateway.metrics import ISSUER_FETCHES

_RETRY_S: Final = 10.0
_REFRESH_S: Final = 300.0
_FETCH_S: Final = 5.0
_DOCUMENT_BYTES: Final = 1 << 18
_KEYS: Final = 100
_DISCOVERY: Final = "/.well-known/openid-configuration"
# Of the base64url of a modulus: 2,048 to 8,192 bits; of an exponent.
_MODULUS, _EXPONENT = (342, 1368), 8
_TROUBLE: Final = (aiohttp.ClientError, OSError, TimeoutError, ValueError, RecursionError)


class KeysMissing(Problem):
    """The key of a token is not known: it may be after `Issuer.refresh`."""

    def __init__(self, kind: str, detail: str, issuer: Issuer) -> None:
        super().__init__(kind, detail)
        self.issuer = issuer


class Issuer:
    """``generation``: changes with its keys."""

    def __init__(
        self,
        settings: IssuerSettings,
        clock_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError."""
        try:
            from joserfc import jwk, jws
        except ModuleNotFoundError:
            raise ConfigError("issuers: take the extra oidc: pip install 'logferry[oidc]'") from None
        self._jwk, self._jws = jwk, jws
        self.settings, self._clock_s, self._monotonic_s = settings, clock_s, monotonic_s
        self._registry = jws.JWSRegistry(algorithms=[*ALGORITHMS], strict_check_header=False)
        self._verify: ssl.SSLContext | bool = True
        if settings.ca_file is not None:
            try:
                self._verify = ssl.create_default_context(cafile=settings.ca_file)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"issuers: {settings.name}: ca_file: {settings.ca_file}: {error}") from None
        self._keys: dict[tuple[str, str | None], Any] = {}
        self._documents: list[Any] = []
        self.generation = 0
        self._fetched_s = self._tried_s = -math.inf
        self._error: str | None = None
        self._fetching: asyncio.Task[None] | None = None

    # ---- verification -----------------------------------------------------------------------------------------------

    def claims(self, token: str, said: UnverifiedToken) -> dict[str, Any]:
        """The claims of the token. Raises Problem ``unauthenticated``, or KeysMissing."""
        self.check_age()
        key = self._key(said)
        try:
            found = self._jws.deserialize_compact(token, key, registry=self._registry)
        except Exception:  # noqa: BLE001  whatever is wrong with it, it is not signed by the issuer
            raise refused("is not signed by its issuer") from None
        if found.headers().get("alg") != said.algorithm or found.payload is None:
            raise refused("is not signed by its issuer")
        return verified_claims(found.payload, self.settings, self._clock_s())

    def check_age(self) -> None:
        """Begins to refresh keys in time. Raises KeysMissing when they are too old."""
        age_s = self._monotonic_s() - self._fetched_s
        if age_s > self.settings.keys_max_age_s:
            self._missing("issuer-unavailable", f"the keys of the issuer {self.settings.name} cannot be had")
        if age_s > _REFRESH_S:
            with suppress(RuntimeError):  # outside of an event loop
                self._begin()

    def _key(self, said: UnverifiedToken) -> Any:
        """That of the token's kid; without one the only one of its algorithm."""
        if said.kid is not None:
            key = self._keys.get((said.algorithm, said.kid))
        else:
            fitting = [key for (algorithm, _), key in self._keys.items() if algorithm == said.algorithm]
            key = fitting[0] if len(fitting) == 1 else None
        if key is None:
            kind = "unauthenticated" if self._error is None else "issuer-unavailable"
            self._missing(kind, f"the issuer {self.settings.name} gives no key for this token")
        return key

    def _missing(self, kind: str, detail: str) -> NoReturn:
        raise KeysMissing(kind, detail, self)

    # ---- keys -------------------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Fetches the keys, unless that was tried a short time ago. What fails is logged."""
        task = self._begin()
        if task is not None:
            await asyncio.shield(task)

    def _begin(self) -> asyncio.Task[None] | None:
        """The fetch that is under way, if one is, or may begin. Raises RuntimeError without an event loop."""
        if self._fetching is not None and not self._fetching.done():
            return self._fetching
        loop, now_s = asyncio.get_running_loop(), self._monotonic_s()
        if now_s - self._tried_s < _RETRY_S:
            return None
        self._tried_s = now_s
        self._fetching = loop.create_task(self._fetch())
        return self._fetching

    async def _fetch(self) -> None:
        settings, began_s = self.settings, self._monotonic_s()
        try:
            async with (
                asyncio.timeout(_FETCH_S),
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._verify)) as session,
            ):
                url = settings.keys_url
                if url is None:
                    found = await _document(session, settings.issuer.rstrip("/") + _DISCOVERY)
                    if found.get("issuer") != settings.issuer or not isinstance(found.get("jwks_uri"), str):
                        raise ValueError("its discovery document is of another issuer, or has no jwks_uri")
                    url = found["jwks_uri"]
                    check_fetchable(url)
                self._take((await _document(session, url)).get("keys"))
        except _TROUBLE as error:
            ISSUER_FETCHES.labels(settings.name, "failed").inc()
            if self._error is None:
                log.event("issuer_unreachable", issuer=settings.name, error=repr(error))
            self._error = repr(error)
        else:
            ISSUER_FETCHES.labels(settings.name, "done").inc()
            self._error, self._fetched_s = None, began_s

    def _take(self, documents: Any) -> None:
        """Raises ValueError."""
        if not isinstance(documents, list):
            raise ValueError("its keys are no list")
        if documents == self._documents and self._keys:
            return
        keys: dict[tuple[str, str | None], Any] = {}
        for document in documents[:_KEYS]:
            found = self._imported(document)
            if found is not None:
                algorithm, kid, key = found
                keys[algorithm, kid] = key
        if not keys:
            raise ValueError("it gives no key for RS256 or ES256")
        self._keys, self._documents, self.generation = keys, documents, self.generation + 1

    def _imported(self, document: Any) -> tuple[str, str | None, Any] | None:
        """A public key that signs tokens, of its public numbers alone, with its algorithm and kid; None: another one,
        which is left out."""
        if not isinstance(document, dict) or document.get("use", "sig") != "sig":
            return None
        kind, kid = document.get("kty"), document.get("kid")
        names = {"RSA": ("kty", "n", "e"), "EC": ("kty", "crv", "x", "y")}.get(str(kind), ())
        numbers: dict[str, Any] = {name: document.get(name) for name in names}
        is_text = all(isinstance(value, str) for value in numbers.values())
        if not numbers or not is_text or not (kid is None or isinstance(kid, str)):
            return None
        if kind == "RSA":
            algorithm, least, most = "RS256", *_MODULUS
            is_fit = least <= len(str(numbers["n"])) <= most and len(str(numbers["e"])) <= _EXPONENT
        else:
            algorithm, is_fit = "ES256", numbers["crv"] == "P-256"
        if not is_fit or document.get("alg", algorithm) != algorithm:
            return None
        try:
            key = (self._jwk.RSAKey if kind == "RSA" else self._jwk.ECKey).import_key(numbers)
        except Exception:  # noqa: BLE001  one bad key leaves the others
            return None
        return algorithm, kid, key


async def _document(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Raises one of `_TROUBLE`."""
    async with session.get(url, allow_redirects=False, headers={"Accept": "application/json"}) as answer:
        if answer.status != 200:
            raise ValueError(f"{url} answered {answer.status}")
        raw = bytearray()
        async for part in answer.content.iter_any():
            raw += part
            if len(raw) > _DOCUMENT_BYTES:
                raise ValueError(f"{url} has more than {_DOCUMENT_BYTES} bytes")
    found = json.loads(raw)
    if not isinstance(found, dict):
        raise ValueError(f"{url} is no object of JSON")
    return found
