"""Checks of what a service needs to know callers by certificate: their authorities, the revoked ones, the workers' key.

The files are read as TLS reads them. It tells neither the dates of a list of revoked certificates nor whose list it is:
the fields of DER that have these are decoded here (RFC 5280, sections 4.1 and 5.1).
"""

from __future__ import annotations

import hashlib
import os
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from logferry.gateway.config import ConfigError, Tls, read_worker_key
from logferry.gateway.tls import caller_context, server_context
from logferry.ops.doctor.host import expiry
from logferry.ops.doctor.role import Check, Role, State

# Whoever renews a list in time does so before the last quarter of its life.
_LATE: Final = 4
_ROUNDS: Final = 200_000
_BEGIN, _END = "-----BEGIN X509 CRL-----", "-----END X509 CRL-----"
_INTEGER, _UTC_TIME, _GENERALIZED_TIME, _CERTIFICATE_VERSION = 0x02, 0x17, 0x18, 0xA0


def check_callers(role: Role) -> Iterator[Check]:
    if role.worker_key is not None and os.access(role.worker_key, os.R_OK):
        yield _worker_key(role, role.worker_key)
    if role.tls is not None and role.tls.client_ca is not None:
        yield from _authorities(role.name, role.tls, role.tls.client_ca)


def _worker_key(role: Role, path: Path) -> Check:
    """By its mark operators compare the files of several hosts. The mark is no help to whoever guesses the key."""
    subject = f"{role.name}: worker_key_file"
    try:
        key = read_worker_key(path)
    except ConfigError as error:
        remedy = "openssl rand -hex 32 makes one; it is the same for all workers"
        return Check("certificates", subject, State.WRONG, str(error), remedy)
    mark = hashlib.pbkdf2_hmac("sha256", key, b"logferry worker key", _ROUNDS)[:4].hex()
    return Check("certificates", subject, State.OK, f"mark {mark}, which must be the same on all hosts of {role.name}")


def _authorities(name: str, tls: Tls, client_ca: Path) -> Iterator[Check]:
    subject = f"{name}: tls.client_ca"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(client_ca)
    except (OSError, ssl.SSLError) as error:
        text = f"{client_ca}: {getattr(error, 'reason', None) or getattr(error, 'strerror', None) or error}"
        yield Check("certificates", subject, State.WRONG, text, "install the authorities of callers (PEM)")
        return
    stats = context.cert_store_stats()
    if leaves := stats["x509"] - stats["x509_ca"]:
        text = f"{client_ca}: {leaves} of its certificates cannot sign others"
        yield Check("certificates", subject, State.WRONG, text, "install the authorities alone, without what they sign")
    authorities = dict(zip(context.get_ca_certs(binary_form=True), context.get_ca_certs(), strict=True))
    for authority in authorities.values():
        yield expiry(f"{subject} {_common_name(authority)}", authority)
    if tls.client_crl is not None:
        yield from _revocations(f"{name}: tls.client_crl", tls.client_crl, authorities)
    if tls.client_certificates == "required":
        try:
            server_context(tls)
        except ConfigError:
            return
        try:
            caller_context(tls)
        except ConfigError as error:
            remedy = "let client_ca sign the workers' certificates, for clients too"
            yield Check("certificates", f"{name}: tls.client_certificates", State.WRONG, str(error), remedy)


def _revocations(subject: str, path: Path, authorities: dict[bytes, dict[str, Any]]) -> Iterator[Check]:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
        found = [revocation_list(der) for der in _lists(path.read_text(encoding="ascii"))]
    except (OSError, ssl.SSLError, ValueError, IndexError) as error:
        text = f"{path}: {getattr(error, 'reason', None) or getattr(error, 'strerror', None) or 'not a list'}"
        yield Check("certificates", subject, State.WRONG, text, "install a list (PEM) of each authority in client_ca")
        return
    known = {_subject_of(der): _common_name(authority) for der, authority in authorities.items()}
    for issuer in known.keys() - {one.issuer for one in found}:
        text = f"{path} has no list of {known[issuer]}: all its certificates are refused"
        yield Check("certificates", subject, State.WRONG, text, "add its list, also an empty one")
    for one in found:
        yield _freshness(f"{subject} {known.get(one.issuer, 'of an authority that is not in client_ca')}", one)


class RevocationList(NamedTuple):
    """``issuer``: its name as in DER; ``next_s`` None: the list has no end."""

    issuer: bytes
    at_s: float
    next_s: float | None


def _freshness(subject: str, one: RevocationList) -> Check:
    now_s = time.time()
    if one.at_s > now_s:
        remedy = "compare the clocks of this host and of the authority"
        return Check("certificates", subject, State.WRONG, f"valid from {_day(one.at_s)} on", remedy)
    if one.next_s is None:
        return Check("certificates", subject, State.OK, f"of {_day(one.at_s)}, without an end")
    text = f"of {_day(one.at_s)}, valid until {_day(one.next_s)}"
    if one.next_s <= now_s:
        text += ": all certificates are refused"
        return Check("certificates", subject, State.WRONG, text, "install the present list; it needs no restart")
    if one.next_s - now_s < (one.next_s - one.at_s) / _LATE:
        remedy = "renew it before: after that all certificates are refused"
        return Check("certificates", subject, State.WARNING, text, remedy)
    return Check("certificates", subject, State.OK, text)


def _day(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M}"


def _common_name(certificate: dict[str, Any]) -> str:
    names = [value for part in certificate.get("subject", ()) for _, value in part]
    return str(names[-1]) if names else "without a name"


# ---- DER ---------------------------------------------------------------------------------------------------------


class _Element(NamedTuple):
    tag: int
    whole: bytes
    content: bytes


def _elements(data: bytes) -> list[_Element]:
    found, at = [], 0
    while at < len(data):
        size, begin = data[at + 1], at + 2
        if size & 0x80:
            begin += size & 0x7F
            size = int.from_bytes(data[at + 2 : begin], "big")
        found.append(_Element(data[at], data[at : begin + size], data[begin : begin + size]))
        at = begin + size
    return found


def _signed_part(der: bytes, version: int) -> list[_Element]:
    """The fields of what is signed, without its version."""
    fields = _elements(_elements(_elements(der)[0].content)[0].content)
    return fields[1:] if fields[0].tag == version else fields


def revocation_list(der: bytes) -> RevocationList:
    """Raises ValueError or IndexError."""
    _algorithm, issuer, at, *more = _signed_part(der, _INTEGER)
    has_end = bool(more) and more[0].tag in (_UTC_TIME, _GENERALIZED_TIME)
    return RevocationList(issuer.whole, _seconds(at), _seconds(more[0]) if has_end else None)


def _subject_of(certificate: bytes) -> bytes:
    _serial, _algorithm, _issuer, _validity, subject, *_ = _signed_part(certificate, _CERTIFICATE_VERSION)
    return subject.whole


def _seconds(time_field: _Element) -> float:
    text = time_field.content.decode("ascii")
    if time_field.tag == _UTC_TIME:
        text = ("20" if text < "5" else "19") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _lists(text: str) -> list[bytes]:
    """Each list of the file. Text between them is left out, as TLS does."""
    parts = [part.partition(_END)[0] for part in text.split(_BEGIN)[1:]]
    certificate = "-----BEGIN CERTIFICATE-----{}-----END CERTIFICATE-----"
    found = [ssl.PEM_cert_to_DER_cert(certificate.format(part)) for part in parts]
    if not found:
        raise ValueError("no list")
    return found
