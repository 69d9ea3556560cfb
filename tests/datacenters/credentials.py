"""Certificates, users, rights and tokens, made as the pages *Kafka* and *Production* say: their scripts are run.

Kafka's own tool creates the users. `kafka-acls.sh` is stood in for by the request that it sends: 46 starts of a JVM
would take minutes.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from aiokafka.errors import KafkaError
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from logferry.gateway.config import KafkaSettings
from logferry.gateway.kafka.client import KafkaClient, raise_for
from logferry.gateway.tls import kafka_options
from logferry.ops.cli.problems import Unavailable
from logferry.ops.runtime.jars import kafka_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.kafka_cluster import QUICK_START
from logferry.ops.stack.processes import Child

from tests.datacenters.plan import BROKERS, DCS, Host, block, other
from tests.support.kafka_rights import ALLOW, CreateAclsRequest, rights_of_script

ADMIN: Final = "admin"
PASSWORD: Final = "of-brokers-and-admin"  # of the two users that are made with the storage
_READY_S: Final = 120.0
_LOOK_S: Final = 0.5
_TOOLS: Final = {"kafka-configs.sh": "kafka.admin.ConfigCommand"}
_TOKENS: Final = ("web-hosts", "readers", "loader", "operator", "prometheus")


def java(heap: str, main: str, *arguments: str) -> list[str]:
    """A program of Kafka."""
    options = [f"-Xmx{heap}", *QUICK_START, "-XX:+ExitOnOutOfMemoryError", "-XX:-UsePerfData"]
    jars = ":".join(map(str, kafka_jars()))
    return [str(find_java().executable), *options, "-cp", jars, main, *arguments]


class Authority:
    """Signs certificates whose subject is the host's name alone, as `super.users` of the page names it."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self._name).public_key(self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        usage = {"digital_signature": True, "key_cert_sign": True, "crl_sign": True}
        builder = builder.add_extension(_usage(**usage), critical=True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        self._identifier = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
        builder = builder.add_extension(identifier, critical=False)
        self.pem = builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def _builder(self, subject: x509.Name) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().issuer_name(self._name).subject_name(subject)
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(
            now + datetime.timedelta(days=30)
        )

    def issue(self, host: Host) -> tuple[bytes, bytes]:
        """Certificate, and key as PKCS #8."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host.name)])
        names = x509.SubjectAlternativeName([x509.DNSName(name) for name in host.names])
        uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = self._builder(subject).public_key(key.public_key()).add_extension(names, critical=False)
        builder = builder.add_extension(uses, critical=False).add_extension(self._identifier, critical=False)
        signed = builder.add_extension(_usage(digital_signature=True), critical=True).sign(self._key, hashes.SHA256())
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return signed.public_bytes(Encoding.PEM), secret


def _usage(**used: bool) -> x509.KeyUsage:
    names = "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign"
    unused = dict.fromkeys([*names.split(), "crl_sign", "encipher_only", "decipher_only"], False)
    return x509.KeyUsage(**{**unused, **used})


class Secrets:
    """``folder`` holds them as an operator would. ``run``: runs a command on the loader host of a data centre to its
    end. ``digests``: of the tokens."""

    def __init__(self, folder: Path, run: Callable[[str, Child], None], command: Callable[..., list[str]]) -> None:
        self.folder, self._run, self._command = folder, run, command
        self.digests: dict[str, str] = {}
        folder.mkdir(parents=True)
        self._gateways, self._kafka = Authority("gateways"), Authority("kafka")
        (folder / "ca.pem").write_bytes(self._gateways.pem)
        (folder / "kafka-ca.pem").write_bytes(self._kafka.pem)
        for name, main in _TOOLS.items():
            words = " ".join(f"'{word}'" for word in java("128m", main))
            tool = folder / "bin" / name
            tool.parent.mkdir(exist_ok=True)
            tool.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
            tool.chmod(0o700)
        for dc in DCS:
            (folder / dc).mkdir()
            text = block("kafka", "security.protocol=SASL_SSL").replace('password="…"', f'password="{PASSWORD}"')
            text = text.replace("/etc/logferry/", f"{folder}/")
            (folder / dc / "admin.properties").write_text(text, encoding="utf-8")
            (folder / dc / "admin-password").write_text(PASSWORD, encoding="ascii")

    def install(self, host: Host, folder: Path) -> None:
        """The files of step 3 on a host, as far as they exist yet; and a broker's key."""
        etc = folder / "etc/logferry"
        etc.mkdir(parents=True, exist_ok=True)
        for name in ("ca.pem", "kafka-ca.pem"):
            shutil.copy(self.folder / name, etc)
        if host.name.startswith("kafka"):
            certificate, key = self._gateways.issue(host)
            (etc / "gateway.pem").write_bytes(certificate)
            (etc / "gateway.key").write_bytes(key)
            (etc / "gateway.key").chmod(0o640)
            certificate, key = self._kafka.issue(host)
            (folder / "broker.pem").write_bytes(key + certificate + self._kafka.pem)

    def install_passwords(self, host: Host, folder: Path) -> None:
        etc, dc, far = folder / "etc/logferry", host.dc, other(host.dc)
        both = [(one, user) for one in DCS for user in ("loader", "audit")]
        put = {f"{one}/{one}/kafka-{user}-password": f"kafka-{user}-{one}-password" for one, user in both}
        put |= {"loader.token": "loader-token", "operator.token": "operator-token"}
        if host.name.startswith("kafka"):
            put = {f"{dc}/{dc}/kafka-{user}-password": f"kafka-{user}-password" for user in ("gateway", "mirror")}
            put[f"{far}/{far}/kafka-mirror-{dc}-password"] = f"kafka-{far}-password"
        elif host.name.startswith("web"):
            put = {"web-hosts.token": "push-token", "readers.token": "readers-token"}
        for old, new in put.items():
            shutil.copy(self.folder / old, etc / new)
            (etc / new).chmod(0o640)

    # ---- tokens, users, rights ---------------------------------------------------------------------------------------

    def make_tokens(self) -> None:
        text = block("production", "umask 077\nfor name in web-hosts readers loader operator prometheus; do")
        self.shell(DCS[0], "tokens", text, self.folder)
        for name in _TOKENS:
            entry = (self.folder / f"{name}.entry").read_text(encoding="utf-8")
            self.digests[name] = re.findall(r'sha256 = "(\w+)"', entry)[0]

    def make_users(self, dc: str) -> None:
        text = block(
            "kafka",
            "umask 077\ndc=dc1 other=dc2 ",
        )
        self.shell(dc, "users", text.replace("dc=dc1 other=dc2", f"dc={dc} other={other(dc)}"), self.folder / dc)

    async def grant_rights(self, dc: str) -> int:
        """Returns how many were granted."""
        found = rights_of_script(dc, other(dc), self.folder / dc)
        kafka = await self._connected(dc)
        try:
            for user, rights in found.items():
                answer = await kafka.send(kafka.brokers()[0][0], CreateAclsRequest(user, rights, ALLOW))
                for code, message, _ in answer.results:
                    raise_for(code, message)
        finally:
            await kafka.close()
        return sum(map(len, found.values()))

    async def _connected(self, dc: str) -> KafkaClient:
        """As the administrator, when all brokers answer. Raises Unavailable."""
        settings = KafkaSettings(
            bootstrap_servers=",".join(f"kafka{n}.{dc}.example:9093" for n in BROKERS),
            security_protocol="SASL_SSL",
            sasl_username=ADMIN,
            sasl_password_file=self.folder / dc / "admin-password",
            ca_file=self.folder / "kafka-ca.pem",
        )
        deadline, why = asyncio.get_running_loop().time() + _READY_S, ""
        while asyncio.get_running_loop().time() < deadline:
            kafka = KafkaClient(kafka_options(settings), "datacenters")
            try:
                await kafka.start()
                if len((await kafka.describe([])).brokers) == len(BROKERS):
                    return kafka
            except (KafkaError, OSError) as error:
                why = repr(error)
            await kafka.close()
            await asyncio.sleep(_LOOK_S)
        raise Unavailable(f"Kafka of {dc} does not answer: {why}")

    async def await_brokers(self, dc: str) -> None:
        await (await self._connected(dc)).close()

    def shell(self, dc: str, name: str, text: str, folder: Path) -> None:
        """A script of the documentation, on the loader host, with our programs in the PATH. Raises Unavailable."""
        if text.startswith("$ "):
            text = re.sub(r"^\$ ", "", text, flags=re.MULTILINE)
        script = folder / f"{name}.sh"
        script.write_text(f"set -eu\ncd '{folder}'\n{text}", encoding="utf-8")
        path = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        command = self._command(f"load1.{dc}.example", "sh", str(script))
        self._run(dc, Child(name, command, folder / f"{name}.log", {**os.environ, "PATH": path}))
