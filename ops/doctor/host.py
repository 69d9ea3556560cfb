"""Checks of this host and its network: files, disks, versions, names, ports, certificates, and clocks of gateways."""

from __future__ import annotations

import http.client
import os
import platform
import shutil
import socket
import ssl
import time
import urllib.parse
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from logferry.gateway.access.settings import expiring
from logferry.gateway.broker_clock import STOP_S, WARN_S
from logferry.gateway.config import ConfigError
from logferry.gateway.tls import kafka_options, server_context
from logferry.ops.doctor.role import Check, Cluster, Endpoint, Role, State

_TIMEOUT_S: Final = 5.0
_DAYS: Final = 14
_DAY_S: Final = 86_400
_LOW, _FULL = 0.20, 0.05  # free space
_GROUP_OR_ALL: Final = 0o007


def check_host(role: Role) -> Iterator[Check]:
    yield from _versions(role)
    for path in role.secrets:
        yield _secret(role, path)
    for what, folder in role.folders:
        yield _disk(role, what, folder)
    yield from _own_certificates(role)
    for name, at in expiring(role.tokens, time.time()):
        remedy = f"logferry token {name} --config FILE prints the entry with another one"
        yield Check("tokens", f"{role.name}: {name}", State.WARNING, f"no valid token from {at} on", remedy)


def _versions(role: Role) -> Iterator[Check]:
    text = f"logferry {version('logferry')}, Python {platform.python_version()}"
    yield Check("versions", role.name, State.OK, text)
    if role.needs_java:
        from logferry.ops.cli.problems import Unavailable
        from logferry.ops.runtime.java import find_java

        try:
            yield Check("versions", f"{role.name}: Java", State.OK, f"Java {find_java().version}")
        except Unavailable as error:
            yield Check("versions", f"{role.name}: Java", State.WRONG, str(error), "install Java 17 or 21")


def _secret(role: Role, path: Path) -> Check:
    """Its bytes are not read, apart from what the service itself reads."""
    subject = f"{role.name}: {path}"
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return Check("files", subject, State.WRONG, str(error.strerror), "create it, readable for the service's user")
    if not os.access(path, os.R_OK):
        return Check(
            "files", subject, State.WRONG, "this user cannot read it", "run as the service's user, or chgrp it"
        )
    if mode & _GROUP_OR_ALL:
        return Check("files", subject, State.WRONG, f"everybody may read it (mode {mode & 0o777:o})", "chmod o= it")
    return Check("files", subject, State.OK, f"mode {mode & 0o777:o}")


def _disk(role: Role, what: str, folder: Path) -> Check:
    subject = f"{role.name}: {what} {folder}"
    present = next((one for one in (folder, *folder.parents) if one.exists()), None)
    if present is None or (present != folder and not os.access(present, os.W_OK)):
        return Check("disk", subject, State.WRONG, "the folder is missing", "create it for the service's user")
    if not os.access(present, os.W_OK):
        return Check(
            "disk", subject, State.WRONG, "this user cannot write there", "run as the service's user, or chown it"
        )
    usage = shutil.disk_usage(present)
    free = usage.free / usage.total
    text = f"{usage.free / 1e9:.1f} GB free ({free:.0%})"
    if free < _FULL:
        return Check("disk", subject, State.WRONG, text, "remove files or grow the disk: writing stops when it is full")
    if free < _LOW:
        return Check("disk", subject, State.WARNING, text, "grow the disk: plan with 20 % free")
    return Check("disk", subject, State.OK, text)


# ---- certificates ------------------------------------------------------------------------------------------------


def _own_certificates(role: Role) -> Iterator[Check]:
    if role.tls is not None:
        subject = f"{role.name}: tls.certificate"
        try:
            server = server_context(role.tls)
        except ConfigError as error:
            yield Check("certificates", subject, State.WRONG, str(error), "install the certificate and its key")
        else:
            yield _own_certificate(subject, server, role.tls.certificate, role.host or "")
    for cluster in role.clusters:
        kafka = cluster.kafka
        if kafka.cert_file is not None and kafka.key_file is not None:
            subject, context = (
                f"{role.name}: {cluster.label} cert_file",
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH),
            )
            try:
                context.load_cert_chain(kafka.cert_file, kafka.key_file, lambda: "")
            except (OSError, ssl.SSLError) as error:
                yield Check("certificates", subject, State.WRONG, str(error), "install the certificate and its key")
            else:
                yield _own_certificate(subject, context, kafka.cert_file, "")


def _own_certificate(subject: str, server: ssl.SSLContext, file: Path, host: str) -> Check:
    """A handshake in memory, in which the certificate itself is the authority. ``host``: a name that it must bear."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = bool(host)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(file)
    here_in, here_out, there_in, there_out = (ssl.MemoryBIO() for _ in range(4))
    mine = client.wrap_bio(here_in, here_out, server_hostname=host or None)
    theirs = server.wrap_bio(there_in, there_out, server_side=True)
    for _ in range(4):
        for side, out, other in ((mine, here_out, there_in), (theirs, there_out, here_in)):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                return _refused_certificate(subject, error)
            other.write(out.read())
    return expiry(subject, mine.getpeercert() or {})


def _refused_certificate(subject: str, error: ssl.SSLError) -> Check:
    text = getattr(error, "verify_message", "") or error.reason or str(error)
    remedy = "issue a new certificate" if "expired" in text else "check the certificate, its names and its authority"
    return Check("certificates", subject, State.WRONG, text, remedy)


def expiry(subject: str, certificate: Any) -> Check:
    """Of a certificate that TLS has decoded."""
    ends_s = ssl.cert_time_to_seconds(certificate["notAfter"])
    days = (ends_s - time.time()) / _DAY_S
    text = f"valid until {time.strftime('%Y-%m-%d', time.gmtime(ends_s))} ({days:.0f} days)"
    if days < 0:
        return Check("certificates", subject, State.WRONG, text, "issue a new certificate")
    if days < _DAYS:
        return Check("certificates", subject, State.WARNING, text, "issue a new certificate before that day")
    return Check("certificates", subject, State.OK, text)


# ---- network -----------------------------------------------------------------------------------------------------


def check_cluster_network(role: Role, cluster: Cluster) -> Iterator[Check]:
    """Names and ports of the bootstrap servers, and the certificate that each shows."""
    context = None
    if cluster.kafka.is_encrypted:
        try:
            context = kafka_options(cluster.kafka)["ssl_context"]
        except ConfigError as error:
            yield Check("files", f"{role.name}: {cluster.label}", State.WRONG, str(error), "correct the file")
    for server in cluster.kafka.bootstrap_servers.split(","):
        host, _, port = server.strip().rpartition(":")
        subject = f"{role.name}: {cluster.label} {server.strip()}"
        if not port.isdecimal():
            yield Check("names", subject, State.WRONG, "not HOST:PORT", "correct bootstrap_servers")
            continue
        yield from _connection(subject, host.strip("[]"), int(port), context)


def check_gateway(role: Role, gateway: Endpoint) -> Iterator[Check]:
    """Name, port, certificate and clock of a gateway, by its `/healthz`."""
    parts = urllib.parse.urlsplit(gateway.url)
    host, subject = parts.hostname or "", f"{role.name}: {gateway.url}"
    is_encrypted = parts.scheme == "https"
    port = parts.port or (443 if is_encrypted else 80)
    try:
        context = ssl.create_default_context(cafile=gateway.ca_file) if is_encrypted else None
    except (OSError, ssl.SSLError) as error:
        yield Check(
            "certificates", f"{role.name}: ca_file {gateway.ca_file}", State.WRONG, str(error), "correct ca_file"
        )
        return
    found = list(_connection(subject, host, port, context))
    yield from found
    if any(check.state == State.WRONG for check in found):
        return
    caller = (
        http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
        if context is None
        else http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)
    )
    try:
        began_s = time.time()
        caller.request("GET", f"{parts.path.rstrip('/')}/healthz")
        answer = caller.getresponse()
        ended_s = time.time()
    except (OSError, http.client.HTTPException) as error:
        yield Check("ports", subject, State.WRONG, f"no answer: {error!r}", "look at the gateway's log")
        return
    finally:
        caller.close()
    if answer.status != http.client.OK:
        yield Check("ports", subject, State.WRONG, f"/healthz answers {answer.status}", "check the URL")
    elif (date := answer.headers.get("Date")) is not None:
        # The header has whole seconds: half of one is its error.
        ahead_s = (began_s + ended_s) / 2 - parsedate_to_datetime(date).timestamp() - 0.5
        yield clock(subject, ahead_s)


def clock(subject: str, ahead_s: float) -> Check:
    """``ahead_s``: of this host's clock before the other's."""
    text = f"this host is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} it"
    if abs(ahead_s) <= WARN_S:
        return Check("clocks", subject, State.OK, text)
    state = State.WRONG if abs(ahead_s) > STOP_S else State.WARNING
    return Check("clocks", subject, state, text, "synchronise both clocks with NTP: chronyc tracking")


def _connection(subject: str, host: str, port: int, context: ssl.SSLContext | None) -> Iterator[Check]:
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        yield Check(
            "names", subject, State.WRONG, f"{host}: {error.strerror}", "add the name to DNS, or correct the setting"
        )
        return
    yield Check("names", subject, State.OK, f"{host} resolves")
    try:
        with socket.create_connection((host, port), _TIMEOUT_S) as plain:
            yield Check("ports", subject, State.OK, f"port {port} is open")
            if context is not None:
                with context.wrap_socket(plain, server_hostname=host) as encrypted:
                    yield expiry(subject, encrypted.getpeercert() or {})
    except ssl.SSLError as error:
        yield _refused_certificate(subject, error)
    except OSError as error:
        text = f"port {port}: {error.strerror or error}"
        yield Check("ports", subject, State.WRONG, text, "start the service, or open the port in the firewall")
