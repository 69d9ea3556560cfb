"""Authentication and authorisation: tokens, their rights by patterns of topics, and the check before each handler.

Invariants:

* A right that is not granted is refused. A route without a declared right needs the right to administer everything.
* A caller without a known token learns nothing else (401). One with a token, but not for this topic, gets the same 403
  whether the topic exists or not, before anything is looked up.
* Tokens are kept as SHA-256. They are random and long, so a plain hash is enough, and the look-up is by that hash:
  its duration reveals nothing about a token, since nobody can choose the hash of a guess. The last comparison takes
  constant time all the same. Neither token nor hash is ever logged or put into an answer.
* A token ends at its date by the clock of this host, also for what is under way then: streams ask for present rights.

`logferry token NAME` makes a token and prints its entry for the configuration.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Any, Final

from logferry.gateway import log
from logferry.gateway.access.certificates import (
    CALLER_HEADER,
    Identity,
    PeerRequest,
    handed_on,
    identity_of,
    matching_name,
    verified,
)
from logferry.gateway.access.claims import ends_s, fits, subject, unverified
from logferry.gateway.access.issuer import Issuer
from logferry.gateway.access.rights import (
    ANYBODY,
    NOBODY,
    Caller,
    caller_by_certificate,
    caller_by_claims,
    callers_of,
    entry_of,
    role_of,
)
from logferry.gateway.access.settings import IssuerSettings, TokenSettings, expiring
from logferry.gateway.config import ServiceConfig
from logferry.gateway.contract.names import check_topic, full_topic, split_topic
from logferry.gateway.errors import Problem
from logferry.gateway.http.request import percent_decoded

_DOTS: Final = 2  # in a JSON Web Token
_VERIFIED: Final = 4096
# The places of topic and source in a path: /v1/topics/{3}/sources/{5}/….
_TOPIC, _SOURCE = 3, 5


class Right(Enum):
    OPEN = auto()  # nothing
    METRICS = auto()  # `EVERYTHING`, unless metrics are open
    KNOWN = auto()  # any token; the handler shows what the caller may see
    WRITE = auto()  # to write the topic of the path, as the source of the path if there is one
    READ = auto()  # to read the topic of the path, a full name
    TOPIC = auto()  # to do anything at all with the topic of the path
    SOURCE = auto()  # to write as the source of the path, or to read or administer its topic
    ADMIN = auto()  # to administer the topic of the path
    AGENT = auto()  # any token, in the ways of other agents; the handler checks what is written
    EVERYTHING = auto()  # to administer every topic


_BEARER: Final = ("bearer",)
_SCHEMES: Final = ("bearer", "splunk", "apikey", "basic")


def presented_token(authorization: str | None, schemes: tuple[str, ...] = _SCHEMES) -> str:
    """The token in an Authorization header. Raises Problem ``unauthenticated``.

    Of ``Basic`` it is the password, of ``ApiKey`` what follows the colon: the rest is the agent's own name.
    """
    if authorization is None:
        raise Problem("unauthenticated", "a token is needed: send the header Authorization: Bearer <token>")
    scheme, _, presented = authorization.partition(" ")
    scheme, presented = scheme.lower(), presented.strip()
    if scheme not in schemes:
        raise Problem("unauthenticated", "the Authorization header must have the form Bearer <token>")
    if scheme in ("apikey", "basic"):
        try:
            plain = base64.b64decode(presented, validate=True).decode()
        except ValueError:
            raise Problem("unauthenticated", f"the {scheme} credentials are not base64 of name:token") from None
        presented = plain.partition(":")[2]
    return presented


class Gate:
    """Admits requests, or raises. `replace` changes the tokens while connections stay open."""

    def __init__(self, config: ServiceConfig, clock_s: Callable[[], float] = time.time) -> None:
        self._config, self._clock_s = config, clock_s
        self._tokens: dict[bytes, Caller] = {}
        self._roles: dict[str, Caller] = {}
        self._issuers: dict[str, Issuer] = {}
        self._verified: dict[bytes, tuple[Caller, Issuer, int]] = {}
        # Entry and name of a certificate, by all names in it.
        self._matched: dict[tuple[str, ...], tuple[str, str] | None] = {}
        self.settings: list[TokenSettings] = []
        self.takes_certificates = False
        self.worker_key = config.worker_key
        # Changes with the authorities of client certificates, and the list of revoked ones.
        self.generation = 0
        self.replace(config.tokens, config.issuers)

    def replace(self, tokens: Sequence[TokenSettings], issuers: Sequence[IssuerSettings] = ()) -> None:
        """Accepts these tokens, and those of these issuers, and no others from now on.

        Raises ValueError: the last one cannot be removed, on loopback neither, where a proxy may be in front. Raises
        ConfigError for an issuer that cannot be used; nothing is changed then.
        """
        if self.settings and not tokens:
            raise ValueError(
                f"tokens: the last one cannot be removed while the {self._config.service} runs: "
                "everybody could do everything"
            )
        dcs = self._config.known_dcs
        # An issuer that stays the same keeps its keys.
        before = self._issuers
        self._issuers = {
            one.issuer: known
            if (known := before.get(one.issuer)) is not None and known.settings == one
            else Issuer(one, self._clock_s)
            for one in issuers
        }
        self._roles = {token.name: role_of(token, dcs) for token in tokens}
        by_hash = [caller for token in tokens for caller in callers_of(token, self._roles[token.name])]
        self._tokens = {caller.sha256: caller for caller in by_hash}
        self._verified, self._matched = {}, {}
        self.settings = [*tokens]
        self.takes_certificates = any(token.certificates for token in tokens)
        for name, at in self.expiring():
            log.event("token_expires", token=name, at=at)

    def expiring(self) -> list[tuple[str, str]]:
        """The callers that soon have no valid token, each with the time from which on it has none."""
        return [*expiring(self.settings, self._clock_s())]

    def ends(self) -> Iterator[tuple[str, float]]:
        """The callers whose tokens end, each with the time."""
        now_s = self._clock_s()
        ends = ((token.name, token.valid_until_s(now_s)) for token in self.settings)
        return ((name, until_s) for name, until_s in ends if until_s < math.inf)

    def warnings(self) -> list[str]:
        """Each as ``what: remedy``."""
        remedy = "add another one with its dates to the entry, and reload"
        return [f"{name} has no valid token from {at} on: {remedy}" for name, at in self.expiring()]

    def present(self, caller: Caller) -> Caller:
        """A caller admitted before, with its present rights: none if its token is gone or has ended, whatever bears
        its name."""
        if not self.settings:
            return ANYBODY
        found = self._tokens.get(caller.sha256, NOBODY)
        if caller.identity is not None:
            found = self._by_certificate(caller.identity) or NOBODY
            found = found if caller.generation == self.generation else NOBODY
        elif caller.issuer is not None:
            with suppress(Problem):
                found = self._by_claims(caller.issuer, caller.claims, caller.sha256) or NOBODY
        return found if found.begins_s <= self._clock_s() < found.ends_s else NOBODY

    def entry(self, name: str) -> Caller:
        """The present rights of the entry of a caller with this name, whatever the dates of its tokens."""
        return self._roles.get(entry_of(name) or "", NOBODY) if self.settings else ANYBODY

    def admit(
        self, right: Right, headers: Mapping[str, str], segments: list[str], peer: PeerRequest | None = None
    ) -> Caller:
        """`identify` and `check`."""
        caller = self.identify(right, headers, peer)
        self.check(caller, right, segments)
        return caller

    def identify(self, right: Right, headers: Mapping[str, str], peer: PeerRequest | None = None) -> Caller:
        """The caller, whatever it may do. ``headers``: those of the request.

        A token counts before a certificate. ``peer``: of the request, None: it has no certificate.

        Raises Problem ``unauthenticated``; KeysMissing where it may be known once the keys of its issuer were fetched.
        Raises Problem ``forbidden`` where a JSON Web Token has the rights of no entry.
        """
        if not self.settings or right is Right.OPEN or (right is Right.METRICS and self._config.open_metrics):
            return ANYBODY
        authorization = headers.get("Authorization")
        if authorization is None and peer is not None and self.takes_certificates:
            return self._of_peer(headers.get(CALLER_HEADER), peer)
        return self._caller(authorization, _SCHEMES if right is Right.AGENT else _BEARER)

    def check(self, caller: Caller, right: Right, segments: list[str]) -> None:
        """Raises Problem ``forbidden`` unless the caller may do this, and Malformed for a name that cannot be one.
        ``segments``: of the raw path."""
        if caller is not ANYBODY and not self._allows(caller, right, segments):
            refused = Problem("forbidden", f"the token {caller.name} does not have the right to do this")
            refused.caller = caller.name
            raise refused

    def is_handed_on(self, header: str, method: str, path: str) -> bool:
        """Whether another worker has sent the request, as it signed in the header."""
        return handed_on(self.worker_key, method, path, header, self._clock_s())

    def _caller(self, authorization: str | None, schemes: tuple[str, ...]) -> Caller:
        presented = presented_token(authorization, schemes)
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        caller = self._tokens.get(digest, NOBODY)
        if not hmac.compare_digest(caller.sha256, digest):
            if self._issuers and presented.count(".") == _DOTS:
                return self._of_issuer(presented, digest)
            raise Problem("unauthenticated", "the token is not configured here")
        if not caller.begins_s <= (now_s := self._clock_s()) < caller.ends_s:
            raise Problem(
                "unauthenticated", f"the token {'is not valid yet' if now_s < caller.begins_s else 'has ended'}"
            )
        return caller

    def _of_peer(self, header: str | None, peer: PeerRequest) -> Caller:
        """The caller by its certificate, or as another worker has signed. Raises Problem ``unauthenticated``."""
        now_s = self._clock_s()
        if header is not None:
            identity = verified(self.worker_key, peer.method, peer.path, header, now_s)
        elif peer.certificate:
            identity = identity_of(peer.certificate)
        else:
            raise Problem("unauthenticated", "a token or a certificate is needed: send Authorization: Bearer <token>")
        if now_s >= identity.ends_s:
            raise Problem("unauthenticated", "the certificate has ended")
        caller = self._by_certificate(identity)
        if caller is None:
            raise Problem("unauthenticated", "no entry of the configuration has a name of the certificate")
        return caller

    def _by_certificate(self, identity: Identity) -> Caller | None:
        """The caller with the rights of the first entry that has one of its names. What was found for names is
        remembered: there may be many of them, and many entries."""
        if identity.names not in self._matched:
            if len(self._matched) >= _VERIFIED:
                self._matched.clear()
            found = ((token.name, matching_name(identity.names, token.certificates)) for token in self.settings)
            self._matched[identity.names] = next(((entry, name) for entry, name in found if name is not None), None)
        match = self._matched[identity.names]
        return match and caller_by_certificate(self._roles[match[0]], match[1], identity, self.generation)

    def _of_issuer(self, presented: str, digest: bytes) -> Caller:
        """The caller of a JSON Web Token. What was verified is remembered, as long as the issuer's keys are the same.

        Raises Problem ``unauthenticated``, ``issuer-unavailable`` or ``forbidden``.
        """
        known = self._verified.get(digest)
        if known is not None:
            caller, issuer, generation = known
            if generation == issuer.generation and self._clock_s() < caller.ends_s:
                issuer.check_age()
                return caller
        said = unverified(presented)
        found = self._issuers.get(said.issuer)
        if found is None:
            raise Problem("unauthenticated", "the token is of an issuer that is not configured here")
        by_claims = self._by_claims(said.issuer, found.claims(presented, said), digest)
        if by_claims is None:
            raise Problem("forbidden", "no entry of the configuration has the claims of the token")
        if len(self._verified) >= _VERIFIED:
            self._verified.clear()
        self._verified[digest] = by_claims, found, found.generation
        return by_claims

    def _by_claims(self, issuer: str, claims: Mapping[str, Any], digest: bytes) -> Caller | None:
        """The caller with the rights of the first entry that its claims fit. Raises Problem ``unauthenticated``."""
        found = self._issuers.get(issuer)
        if found is None:
            return None
        settings = found.settings
        for token in self.settings:
            if any(rule.issuer == settings.name and fits(claims, rule) for rule in token.claims):
                name, until_s = subject(claims, settings), ends_s(claims, settings)
                return caller_by_claims(self._roles[token.name], name, issuer, claims, digest, until_s)
        return None

    def _allows(self, caller: Caller, right: Right, segments: list[str]) -> bool:
        if right in (Right.KNOWN, Right.AGENT):
            return True
        if right in (Right.METRICS, Right.EVERYTHING):
            return caller.admin.is_everything
        name = percent_decoded(segments[_TOPIC], "topic")
        if right is Right.READ:
            split_topic(name)
            return caller.may_read(name)
        if right is Right.TOPIC:
            return caller.may_see(self._config.full_name(name))
        topic = full_topic(self._config.dc, check_topic(name))
        if right is Right.ADMIN:
            return caller.admin.match(topic)
        if caller.sources.is_everything or len(segments) <= _SOURCE:
            return caller.write.match(topic) or (right is Right.SOURCE and caller.may_see(topic))
        source_id = percent_decoded(segments[_SOURCE], "sourceId")
        allowed = caller.may_write_as if right is Right.WRITE else caller.may_see_source
        return allowed(topic, source_id)
