"""What a JSON Web Token says, before and after its signature is verified. The time is passed in.

The rules, in the order in which they are checked:

* at most `_TOKEN_BYTES`; three parts; the header is small and names an algorithm of `ALGORITHMS`, a text as ``kid`` if
  it has one, and no ``crit``. Keys or URLs in the header are never used;
* the signature is verified with a key of the issuer that ``iss`` names, and one for that algorithm alone: a key of RSA
  is never used as another one;
* only then its claims count: ``iss`` and ``aud`` as configured, ``exp`` there and not past, ``nbf`` and ``iat`` not in
  the future.
"""

from __future__ import annotations

import binascii
import json
import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, NoReturn
from urllib.parse import quote

from logferry.gateway.access.settings import ClaimSettings, IssuerSettings
from logferry.gateway.errors import Problem

ALGORITHMS: Final = ("RS256", "ES256")
_TOKEN_BYTES: Final = 8192
_HEADER_BYTES: Final = 1024
_KID_BYTES: Final = 256
_SUBJECT_BYTES: Final = 128
_TYPES: Final = (None, "jwt", "at+jwt", "application/at+jwt")
# Claims that hold several words in one text.
_WORDS: Final = ("scope", "scp")
# Beyond the year 9999 a date is a mistake, such as one in milliseconds.
_LATEST_S: Final = 253_402_300_800


class UnverifiedToken(NamedTuple):
    """What chooses the key. ``issuer``: the claim ``iss``."""

    algorithm: str
    kid: str | None
    issuer: str


def unverified(token: str) -> UnverifiedToken:
    """Raises Problem ``unauthenticated`` for what can be no token of an issuer."""
    if len(token) > _TOKEN_BYTES or not token.isascii():
        raise refused(f"is longer than {_TOKEN_BYTES} bytes, or not in ASCII")
    first, second, _ = token.split(".")
    if len(first) > _HEADER_BYTES:
        raise refused(f"has a header of more than {_HEADER_BYTES} bytes")
    header, claims = _object(first), _object(second)
    algorithm, kid, kind = header.get("alg"), header.get("kid"), header.get("typ")
    if algorithm not in ALGORITHMS:
        raise refused(f"is not signed with {' or '.join(ALGORITHMS)}")
    if "crit" in header or not (kind is None or (isinstance(kind, str) and kind.lower() in _TYPES)):
        raise refused("has a header of another kind of token")
    if not (kid is None or (isinstance(kid, str) and len(kid) <= _KID_BYTES)):
        raise refused("has a kid that is none")
    issuer = claims.get("iss")
    if not isinstance(issuer, str):
        raise refused("names no issuer")
    return UnverifiedToken(algorithm, kid, issuer)


def _object(part: str) -> dict[str, Any]:
    padded = part.translate({45: 43, 95: 47}) + "=" * (-len(part) % 4)
    try:
        found = json.loads(binascii.a2b_base64(padded, strict_mode=True), parse_constant=_no_number)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise refused("is not made of base64url and JSON")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def verified_claims(payload: bytes, settings: IssuerSettings, now_s: float) -> dict[str, Any]:
    """The claims of a payload whose signature is good. Raises Problem ``unauthenticated``."""
    try:
        claims = json.loads(payload, parse_constant=_no_number)
    except (ValueError, RecursionError):
        claims = None
    if not isinstance(claims, dict) or claims.get("iss") != settings.issuer:
        raise refused("is of another issuer")
    audience = claims.get("aud")
    named = audience if isinstance(audience, list) else [audience]
    if not any(one in named for one in settings.audience):
        raise refused("is for another audience")
    skew_s = settings.clock_skew_s
    ends_s, begins_s, issued_s = (_time(claims, name) for name in ("exp", "nbf", "iat"))
    if ends_s is None:
        raise refused("has no exp")
    if now_s >= ends_s + skew_s:
        raise refused("has ended")
    if any(at_s is not None and now_s < at_s - skew_s for at_s in (begins_s, issued_s)):
        raise refused("is not valid yet")
    return claims


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LATEST_S:
        raise refused(f"has an {name} that is no time")
    return float(value)


def ends_s(claims: Mapping[str, Any], settings: IssuerSettings) -> float:
    """From when on a token with these claims is refused."""
    return (_time(claims, "exp") or -math.inf) + settings.clock_skew_s


def subject(claims: Mapping[str, Any], settings: IssuerSettings) -> str:
    """The name of the caller by its claims; two names are never the same. Raises Problem ``unauthenticated``."""
    value = claims.get(settings.name_claim)
    if not isinstance(value, str) or not value:
        raise refused(f"has no {settings.name_claim} that names its caller")
    try:
        name = quote(value, safe="@|+=:,")
    except UnicodeEncodeError:
        name = ""
    if not 0 < len(name) <= _SUBJECT_BYTES:
        raise refused(f"has a {settings.name_claim} of more than {_SUBJECT_BYTES} bytes, or not of UTF-8")
    return name


def fits(claims: Mapping[str, Any], rule: ClaimSettings) -> bool:
    """Whether the claims have what the rule says."""
    found: Any = claims.get(rule.claim)
    if found is None and "." in rule.claim:
        found = claims
        for name in rule.claim.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
    if isinstance(found, list):
        return rule.value in [value for value in found if isinstance(value, str)]
    if not isinstance(found, str):
        return False
    return rule.value in found.split(" ") if rule.claim in _WORDS else rule.value == found


def refused(why: str) -> Problem:
    return Problem("unauthenticated", f"the token {why}")
