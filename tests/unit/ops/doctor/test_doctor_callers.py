"""`logferry doctor` on callers with certificates: each finding is provoked once, with files of a real authority."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from logferry.gateway.config import Tls
from logferry.ops.doctor import command
from logferry.ops.doctor.callers import check_callers
from logferry.ops.doctor.host import check_host
from logferry.ops.doctor.role import Check, Role, State, read_role

NOW = datetime.now(UTC)
KEYS = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]


def authority(name: str, days: float, number: int = 0) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder(subject, subject, KEYS[number].public_key(), 7 + number)
    builder = builder.not_valid_before(NOW - timedelta(days=400)).not_valid_after(NOW + timedelta(days=days))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    return builder.sign(KEYS[number], hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def revoked(name: str, days: tuple[float, float] = (-1, 9), number: int = 0) -> bytes:
    """The list of that authority, of so many days from now and until so many."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateRevocationListBuilder().issuer_name(subject)
    builder = builder.last_update(NOW + timedelta(days=days[0])).next_update(NOW + timedelta(days=days[1]))
    return builder.sign(KEYS[number], hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def own(tmp_path: Path) -> Tls:
    """The certificate of the worker itself, and the settings of callers."""
    leaf = trustme.CA().issue_cert("gw1.example")
    leaf.cert_chain_pems[0].write_to_path(tmp_path / "gateway.pem")
    leaf.private_key_pem.write_to_path(tmp_path / "gateway.key")
    return Tls(
        certificate=tmp_path / "gateway.pem",
        key=tmp_path / "gateway.key",
        client_ca=tmp_path / "callers.pem",
        client_crl=tmp_path / "revoked.pem",
    )


def found(tls: Tls, **more: Any) -> list[Check]:
    checks = list(check_callers(Role("gateway", tls=tls.model_copy(update=more), host="gw1.example")))
    assert all(check.remedy or check.state == State.OK for check in checks)
    return checks


def wrong(checks: list[Check]) -> list[str]:
    assert all(check.area == "certificates" for check in checks)
    return [f"{check.state}: {check.subject}: {check.text}" for check in checks if check.state != State.OK]


@pytest.mark.parametrize(
    ("days", "state"), [(90, State.OK), (13, State.WARNING), (-1, State.WRONG)], ids=["valid", "soon", "expired"]
)
def test_each_authority_of_callers(own: Tls, days: float, state: State) -> None:
    assert own.client_ca is not None
    own.client_ca.write_bytes(authority("one", 400) + authority("two", days + 0.5, 1))
    checks = found(own, client_crl=None)
    assert [(check.subject, check.state) for check in checks] == [
        ("gateway: tls.client_ca one", State.OK), ("gateway: tls.client_ca two", state)
    ]  # fmt: skip
    assert f"({days} days)" in checks[1].text or days < 0


@pytest.mark.parametrize("content", [None, b"nonsense", b""])
def test_authorities_that_cannot_be_read(own: Tls, content: bytes | None) -> None:
    assert own.client_ca is not None
    if content is not None:
        own.client_ca.write_bytes(content)
    [text] = wrong(found(own))
    assert str(own.client_ca) in text
    assert ("No such file" in text) is (content is None)


def test_a_certificate_that_is_no_authority(own: Tls) -> None:
    assert own.client_ca is not None
    own.client_ca.write_bytes(authority("one", 400) + own.certificate.read_bytes())
    [text] = wrong(found(own, client_crl=None))
    assert "1 of its certificates cannot sign others" in text


LISTS = {
    "fresh": ((-1, 9), None),
    "late": ((-8, 2), "warning: gateway: tls.client_crl one: of "),
    "ended": ((-9, -1), "all certificates are refused"),
    "from the future": ((1, 9), "wrong: gateway: tls.client_crl one: valid from "),
    "of another century": ((-1, 366 * 40), None),
}


@pytest.mark.parametrize("case", LISTS)
def test_how_fresh_the_list_of_revoked_certificates_is(own: Tls, case: str) -> None:
    assert own.client_ca is not None
    assert own.client_crl is not None
    days, expected = LISTS[case]
    own.client_ca.write_bytes(authority("one", 400))
    own.client_crl.write_bytes(b"a comment\n" + revoked("one", days))
    texts = wrong(found(own))
    assert len(texts) == (expected is not None)
    assert not texts or (expected or "") in texts[0]
    [check] = [check for check in found(own) if "client_crl" in check.subject]
    # The days that OpenSSL and others print.
    at = NOW + timedelta(days=days[1] if days[0] < 0 else days[0])
    assert f"{at:%Y-%m-%d %H:%M}" in check.text


def test_an_authority_without_a_list(own: Tls) -> None:
    assert own.client_ca is not None
    assert own.client_crl is not None
    own.client_ca.write_bytes(authority("one", 400) + authority("two", 400, 1))
    own.client_crl.write_bytes(revoked("one"))
    [text] = wrong(found(own))
    assert "has no list of two: all its certificates are refused" in text
    own.client_crl.write_bytes(revoked("one") + revoked("two", number=1))
    assert not wrong(found(own))
    own.client_crl.write_bytes(b"nonsense")
    assert len(wrong(found(own))) == 1
    own.client_crl.unlink()
    assert "No such file" in wrong(found(own))[0]


def test_workers_whose_certificates_are_not_of_that_authority(own: Tls) -> None:
    assert own.client_ca is not None
    own.client_ca.write_bytes(authority("one", 400))
    assert not wrong(found(own, client_crl=None))
    [text] = wrong(found(own, client_crl=None, client_certificates="required"))
    assert "also of other workers" in text


def test_the_key_of_the_workers(tmp_path: Path) -> None:
    key = tmp_path / "worker.key"
    role = Role("gateway", worker_key=key, secrets=[key])

    def said(name: str = "") -> list[tuple[State, str]]:
        checks: Iterator[Check] = iter([*check_host(role), *check_callers(role)])
        return [(check.state, check.text) for check in checks if check.area in ("files", "certificates")]

    assert said() == [(State.WRONG, "No such file or directory")]
    key.write_text("short\n")
    key.chmod(0o600)
    assert said()[1] == (State.WRONG, f"worker_key_file: {key} must hold at least 32 characters")
    secret = "0123456789abcdef" * 2
    key.write_text(secret + "\n")
    assert said()[0] == (State.OK, "mode 600")
    state, mark = said()[1]
    assert state == State.OK
    assert secret not in mark
    # The same secret has the same mark on another host, and another one another.
    key.write_text(secret)
    assert said()[1] == (State.OK, mark)
    key.write_text("x" + secret)
    assert said()[1] != (State.OK, mark)
    key.chmod(0o644)
    assert said()[0] == (State.WRONG, "everybody may read it (mode 644)")


def test_they_are_among_the_checks_of_a_gateway(own: Tls, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, file = tmp_path / "worker.key", tmp_path / "gateway.toml"
    key.write_text("k" * 31)
    key.chmod(0o600)
    file.write_text(
        f'dc = "dc1"\nadvertised_host = "gw1.example"\nworker_key_file = "{key}"\n[kafka]\nbootstrap_servers = "k"\n'
        f'[tls]\ncertificate = "{own.certificate}"\nkey = "{own.key}"\nclient_ca = "{own.client_ca}"\n'
    )
    assert key in read_role("gateway", file).secrets
    assert command.main([f"--gateway={file}", "--json"]) == 1
    said = capsys.readouterr().out
    assert "k" * 31 not in said
    texts = [check["text"] for check in json.loads(said)["checks"] if check["state"] == "wrong"]
    assert any("must hold at least 32 characters" in text for text in texts)
    assert any(str(own.client_ca) in text for text in texts)
