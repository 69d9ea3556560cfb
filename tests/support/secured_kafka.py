"""A Kafka that wants TLS and a login, with Kafka's own authorizer; and the connections of its users.

Tests write through the plain listener, whose `ANONYMOUS` may do everything.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import trustme
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from logferry.gateway.config import KafkaSettings
from logferry.loaders.spark.kafka_access import KafkaTopics
from logferry.ops.stack.kafka_cluster import QUICK_START, KafkaCluster
from logferry.ops.stack.processes import free_ports

# With the characters that a login's own syntax uses.
PASSWORD: Final = 'a "quoted" pass\\word; with = all'
PASSWORDS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_SECURITY: Final = "org.apache.kafka.common.security"
_MODULES: Final = {"PLAIN": "plain.PlainLoginModule", "OAUTHBEARER": "oauthbearer.OAuthBearerLoginModule"}

# (type, name, pattern, operation) as in the tables of operations/kafka.md.
Right = tuple[str, str, str, str]


class SecuredKafka(KafkaCluster):
    """``users``: their passwords are `PASSWORD`. ``settings``: of brokers. ``more``: as of `KafkaCluster`.

    ``SECURED``, ``EXPIRED``: listeners with TLS; the certificate of the second expired yesterday.
    """

    def __init__(
        self,
        folder: Path,
        users: Iterable[str],
        settings: Mapping[str, str] | None = None,
        brokers: int = 1,
        **more: Any,
    ) -> None:
        self.folder, self.users = folder, tuple(users)
        folder.mkdir()
        ports = iter(free_ports(3 * brokers))
        self._ports_of = [{name: next(ports) for name in ("SECURED", "EXPIRED", "TLS")} for _ in range(brokers)]
        self.authority = trustme.CA()
        self.authority.cert_pem.write_to_path(str(folder / "ca.pem"))
        trustme.CA().cert_pem.write_to_path(str(folder / "other-ca.pem"))
        (folder / "password").write_text(PASSWORD + "\n")
        (folder / "wrong-password").write_text("a wrong one\n")
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (folder / "keys.json").write_text(json.dumps({"keys": [_public(self._key)]}))
        self.keys_url = (folder / "keys.json").as_uri()
        allowed = f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={self.keys_url}"
        jvm = (*QUICK_START, allowed)
        super().__init__("secured", folder / "kafka", brokers, settings=settings, jvm=jvm, **more)

    def _write_configuration(self, node: int) -> None:
        super()._write_configuration(node)
        broker, controller = self._ports[node]
        extra = ",".join(f"{name}://127.0.0.1:{port}" for name, port in self._ports_of[node - 1].items())
        settings = {
            "listeners": f"PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller},{extra}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{broker},{extra}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURED:SASL_SSL,"
            "EXPIRED:SASL_SSL,TLS:SSL",
            "inter.broker.listener.name": "PLAINTEXT",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "false",
            "super.users": "User:ANONYMOUS",
            "sasl.oauthbearer.jwks.endpoint.url": self.keys_url,
            "sasl.oauthbearer.expected.audience": "kafka",
            "listener.name.tls.ssl.client.auth": "required",
            "listener.name.tls.ssl.principal.mapping.rules": "RULE:^.*CN=([^,]+).*$/$1/,DEFAULT",
        }
        now = datetime.now(UTC)
        for name, days in (("secured", 30), ("expired", -1), ("tls", 30)):
            issued = self.authority.issue_cert("127.0.0.1", not_after=now + timedelta(days=days))
            settings |= {f"listener.name.{name}.{key}": value for key, value in self._tls(issued).items()}
        for name in ("secured", "expired"):
            settings |= {f"listener.name.{name}.{key}": value for key, value in self._logins().items()}
        with (self._folder(node) / "server.properties").open("a", encoding="utf-8") as file:
            file.writelines(f"{name}={_escaped(value)}\n" for name, value in settings.items())

    def _tls(self, issued: trustme.LeafCert) -> dict[str, str]:
        chain = issued.cert_chain_pems[0].bytes() + self.authority.cert_pem.bytes()
        texts = {
            "ssl.keystore.certificate.chain": chain,
            "ssl.keystore.key": pkcs8(issued.private_key_pem.bytes()),
            "ssl.truststore.certificates": self.authority.cert_pem.bytes(),
        }
        pem = {name: text.decode() for name, text in texts.items()}
        return {**pem, "ssl.keystore.type": "PEM", "ssl.truststore.type": "PEM"}

    def _logins(self) -> dict[str, str]:
        quoted = PASSWORD.replace("\\", "\\\\").replace('"', '\\"')
        users = " ".join(f'user_{user}="{quoted}"' for user in self.users)
        jaas = f"{_SECURITY}.{{}} required {{}};"
        handler = f"{_SECURITY}.oauthbearer.OAuthBearerValidatorCallbackHandler"
        found = {"oauthbearer.sasl.server.callback.handler.class": handler}
        for mechanism in (*PASSWORDS, "OAUTHBEARER"):
            module = _MODULES.get(mechanism, "scram.ScramLoginModule")
            login = jaas.format(module, users if mechanism == "PLAIN" else "")
            found[f"{mechanism.lower()}.sasl.jaas.config"] = login
        return {**found, "sasl.enabled.mechanisms": ",".join((*PASSWORDS, "OAUTHBEARER"))}

    def create_users(self, kafka: KafkaTopics) -> None:
        """The users for SCRAM, by Kafka's own client on the plain listener."""
        clients, changes_of = kafka._jvm.org.apache.kafka.clients.admin, kafka._jvm.java.util.ArrayList
        # Kafka takes one change of a user in a request.
        for kind in ("SCRAM_SHA_256", "SCRAM_SHA_512"):
            info, changes = clients.ScramCredentialInfo(getattr(clients.ScramMechanism, kind), 4096), changes_of()
            for user in self.users:
                changes.add(clients.UserScramCredentialUpsertion(user, info, PASSWORD))
            kafka._admin.alterUserScramCredentials(changes).all().get()

    def token(self, user: str, *, seconds: float = 600) -> str:
        """A signed access token, as an identity provider issues it."""
        now = int(time.time())
        claims = {"sub": user, "aud": "kafka", "iss": "tests", "iat": now, "exp": int(now + seconds)}
        parts = b".".join(_b64(json.dumps(part).encode()) for part in ({"alg": "RS256", "kid": "one"}, claims))
        return (parts + b"." + _b64(self._key.sign(parts, padding.PKCS1v15(), hashes.SHA256()))).decode()

    def settings(self, user: str, mechanism: str = "SCRAM-SHA-512", **changes: Any) -> KafkaSettings:
        """The connection of the user. ``changes``: other settings."""
        given = self.plain_settings(user, mechanism) | changes
        return KafkaSettings.model_validate(given)

    def plain_settings(self, user: str, mechanism: str = "SCRAM-SHA-512") -> dict[str, Any]:
        """As in a configuration."""
        found: dict[str, Any] = {"ca_file": str(self.folder / "ca.pem")}
        if mechanism == "certificate":
            issued = self.authority.issue_cert("127.0.0.1", common_name=user)
            issued.cert_chain_pems[0].write_to_path(str(self.folder / f"{user}.pem"))
            (self.folder / f"{user}.key").write_bytes(pkcs8(issued.private_key_pem.bytes()))
            files = {"cert_file": str(self.folder / f"{user}.pem"), "key_file": str(self.folder / f"{user}.key")}
            return found | files | {"bootstrap_servers": self.address("TLS"), "security_protocol": "SSL"}
        found |= {"bootstrap_servers": self.address("SECURED"), "security_protocol": "SASL_SSL"}
        found["sasl_mechanism"] = mechanism
        if mechanism == "OAUTHBEARER":
            (self.folder / f"{user}.token").write_text(self.token(user))
            return found | {"sasl_token_file": str(self.folder / f"{user}.token")}
        return found | {"sasl_username": user, "sasl_password_file": str(self.folder / "password")}

    def address(self, listener: str) -> str:
        return ",".join(f"127.0.0.1:{ports[listener]}" for ports in self._ports_of)


def pkcs8(key: bytes) -> bytes:
    """Java knows no other form."""
    return load_pem_private_key(key, None).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def as_toml(table: str, settings: dict[str, Any]) -> str:
    return f"[{table}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())


def _escaped(value: str) -> str:
    """As a file of properties wants it."""
    return value.replace("\\", "\\\\").replace("\n", "\\n")


def _public(key: rsa.RSAPrivateKey) -> dict[str, str]:
    numbers = key.public_key().public_numbers()
    parts = {
        name: _b64(number.to_bytes((number.bit_length() + 7) // 8, "big")).decode()
        for name, number in (("n", numbers.n), ("e", numbers.e))
    }
    return {"kty": "RSA", "alg": "RS256", "use": "sig", "kid": "one", **parts}


def _b64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
