"""How gateways are reached: whose certificate is believed, and what goes through a proxy."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trustme
from logferry.client.transport.connections import Connections, Dialer, NoResponse, check_pin, proxies_of

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def head_of(connection: socket.socket) -> bytes:
    """Of a request; its body is read, too, or closing would reset the connection."""
    raw = b""
    while b"\r\n\r\n" not in raw or (raw.startswith(b"POST") and not raw.endswith(b"\r\n\r\nbody")):
        more = connection.recv(65536)
        if not more:
            break
        raw += more
    return raw


class Server:
    """Answers each connection once; TLS with the certificate, if one is given. ``heads``: what was asked."""

    def __init__(
        self, certificate: trustme.LeafCert | None = None, tunnels: bool = False, wanted: trustme.CA | None = None
    ) -> None:
        self.heads: list[bytes] = []
        self._context = None
        if certificate is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            certificate.configure_cert(self._context)
        if self._context is not None and wanted is not None:
            wanted.configure_trust(self._context)
            self._context.verify_mode = ssl.CERT_REQUIRED
        self._tunnels = tunnels
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                with contextlib.suppress(OSError):  # refused by the other side
                    self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        if self._tunnels:
            self.heads.append(head_of(connection))
            connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        if self._context is None:
            self.heads.append(head_of(connection))
            connection.sendall(ANSWER)
            return
        with self._context.wrap_socket(connection, server_side=True) as secure:
            self.heads.append(head_of(secure))
            secure.sendall(ANSWER)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@pytest.fixture
def serve() -> Iterator[Any]:
    servers = []

    def start(*arguments: object, **options: object) -> Server:
        servers.append(Server(*arguments, **options))  # type: ignore[arg-type]
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(authority: Any, tmp_path: Path) -> str:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return str(tmp_path / "ca.pem")


def fingerprint(certificate: trustme.LeafCert) -> str:
    pem = certificate.cert_chain_pems[0].bytes().decode()
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()


def ask(dialer: Dialer, url: str) -> int:
    connections = Connections(5.0, dialer)
    try:
        return connections.exchange(url, {"Authorization": "Bearer secret"}, b"body").status
    finally:
        connections.close()


def test_a_certificate_is_verified_by_the_given_authority(serve: Any, authority: Any, ca_file: Any) -> None:
    server = serve(authority.issue_cert("127.0.0.1"))
    assert ask(Dialer(ca_file), f"https://127.0.0.1:{server.port}/") == 200


@pytest.mark.parametrize("names", [("other.example",), None])
def test_a_wrong_name_and_an_unknown_authority_are_refused_before_anything_is_sent(
    serve: Any, authority: Any, ca_file: Any, names: Any
) -> None:
    certificate = authority.issue_cert(*names) if names else trustme.CA().issue_cert("127.0.0.1")
    server = serve(certificate)
    with pytest.raises(NoResponse, match="certificate verify failed"):
        ask(Dialer(ca_file), f"https://127.0.0.1:{server.port}/")
    assert not server.heads


def test_without_an_authority_the_systems_are_asked(serve: Any, authority: Any) -> None:
    server = serve(authority.issue_cert("127.0.0.1"))
    with pytest.raises(NoResponse, match="certificate verify failed"):
        ask(Dialer(), f"https://127.0.0.1:{server.port}/")


def test_a_pin_alone_decides(serve: Any) -> None:
    certificate = trustme.CA().issue_cert("elsewhere.example")
    server = serve(certificate)
    url = f"https://127.0.0.1:{server.port}/"
    assert ask(Dialer(pins=["0" * 64, fingerprint(certificate)]), url) == 200
    with pytest.raises(NoResponse, match="not among the pins"):
        ask(Dialer(pins=["0" * 64]), url)
    assert len([head for head in server.heads if b"secret" in head]) == 1


def test_with_an_authority_and_a_pin_both_have_to_fit(serve: Any, authority: Any, ca_file: Any) -> None:
    certificate, strange = authority.issue_cert("127.0.0.1"), trustme.CA().issue_cert("127.0.0.1")
    url = f"https://127.0.0.1:{serve(certificate).port}/"
    assert ask(Dialer(ca_file, [fingerprint(certificate)]), url) == 200
    with pytest.raises(NoResponse, match="not among the pins"):
        ask(Dialer(ca_file, ["0" * 64]), url)
    with pytest.raises(NoResponse, match="certificate verify failed"):
        ask(Dialer(ca_file, [fingerprint(strange)]), f"https://127.0.0.1:{serve(strange).port}/")


@pytest.mark.parametrize("in_one_file", [True, False])
def test_a_certificate_is_shown_to_a_gateway_that_wants_one(
    serve: Any, authority: Any, ca_file: Any, tmp_path: Path, in_one_file: bool
) -> None:
    server, own = serve(authority.issue_cert("127.0.0.1"), wanted=authority), authority.issue_cert("web1")
    url = f"https://127.0.0.1:{server.port}/"
    cert, key = tmp_path / "cert.pem", None if in_one_file else tmp_path / "key.pem"
    cert.write_bytes(own.cert_chain_pems[0].bytes())
    if key is None:
        cert.write_bytes(own.private_key_and_cert_chain_pem.bytes())
    else:
        key.write_bytes(own.private_key_pem.bytes())
    assert ask(Dialer(ca_file, cert_file=str(cert), key_file=str(key) if key else None), url) == 200
    with pytest.raises(NoResponse):
        ask(Dialer(ca_file), url)
    assert len(server.heads) == 1


def test_a_key_alone_is_refused(ca_file: Any) -> None:
    with pytest.raises(ValueError, match="cert_file"):
        Dialer(ca_file, key_file=ca_file)
    with pytest.raises(ssl.SSLError):
        Dialer(ca_file, cert_file=ca_file)  # it has no key


def test_http_goes_to_the_proxy_with_the_whole_url(serve: Any) -> None:
    proxy = serve()
    dialer = Dialer(proxies={"http": f"http://me:p%40ss@127.0.0.1:{proxy.port}"})
    assert ask(dialer, "http://gateway.example:8080/v1/x?a=b") == 200
    head = proxy.heads[0].split(b"\r\n")
    assert head[0] == b"POST http://gateway.example:8080/v1/x?a=b HTTP/1.1"
    assert b"Proxy-Authorization: Basic bWU6cEBzcw==" in head
    assert b"Host: gateway.example:8080" in head


def test_https_goes_through_a_tunnel_and_the_proxy_sees_no_token(serve: Any, authority: Any, ca_file: Any) -> None:
    proxy = serve(authority.issue_cert("gateway.example"), tunnels=True)
    dialer = Dialer(ca_file, proxies={"https": f"127.0.0.1:{proxy.port}"})
    assert ask(dialer, "https://gateway.example/v1/x") == 200
    tunnel, inside = proxy.heads
    assert tunnel.startswith(b"CONNECT gateway.example:443 HTTP/1")
    assert b"secret" not in tunnel
    assert inside.startswith(b"POST /v1/x HTTP/1.1")


def test_some_hosts_are_reached_without_the_proxy(serve: Any) -> None:
    server = serve()
    proxies = {"http": "http://127.0.0.1:1", "no": "10.0.0.1, .inner.example,p.example:81"}
    assert ask(Dialer(proxies=proxies), f"http://127.0.0.1:{server.port}/") == 200
    where: Callable[[str], str] = lambda url: Dialer(proxies=proxies).connection(urlsplit(url)).host  # noqa: E731
    assert where("http://10.0.0.1/") == "10.0.0.1"
    assert where("http://a.inner.example/") == "a.inner.example"
    assert where("http://p.example:81/") == "p.example"
    for far in ("http://other.example/", "http://p.example/", "http://notinner.example/"):
        assert where(far) == "127.0.0.1"


def test_the_environment_is_read_as_curl_does() -> None:
    environment = {"HTTP_PROXY": "x", "HTTPS_PROXY": "s", "https_proxy": "t", "NO_PROXY": "n", "ALL_PROXY": "a"}
    assert proxies_of(environment) == {"https": "t", "no": "n"}
    assert proxies_of({"http_proxy": "h", "https_proxy": "", "HTTPS_PROXY": "s"}) == {"http": "h", "https": "s"}


@pytest.mark.parametrize("text", ["aB" * 32, "SHA256:" + "ab" * 32, ":".join(["AB"] * 32), " " + "ab" * 32 + "\n"])
def test_pins_as_people_write_them(text: Any) -> None:
    assert check_pin(text) == "ab" * 32


@pytest.mark.parametrize("text", ["", "ab" * 31, "ab" * 33, "xy" * 32, "ab" * 32 + "/"])
def test_what_is_no_pin(text: str) -> None:
    with pytest.raises(ValueError, match="64 hexadecimal"):
        check_pin(text)
