"""Compression of requests: what each module for zstd makes can be read; a host without one refuses it at the start."""

from __future__ import annotations

import gzip
from collections.abc import Iterator

import pytest
from logferry.client.agent.config import parse
from logferry.client.transport import compression
from logferry.client.transport.compression import check_compression, compressed

PARTS: list[bytes | memoryview] = [b"one line\n" * 500, memoryview(b"another one\n" * 300), b""]
GIVEN = ["--url", "http://g:1", "--topic", "t", "--state-dir", "/state", "--compression"]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.setattr(compression, "_ZSTD_MODULES", request.param)
    compression._zstd.cache_clear()
    yield
    compression._zstd.cache_clear()


@pytest.mark.parametrize(
    "modules", [("compression.zstd",), ("no.such", "zstandard"), ("cramjam",)], indirect=True, ids=str
)
def test_the_bodies_of_each_module_can_be_read(modules: None) -> None:
    zstandard = pytest.importorskip("zstandard")
    try:
        check_compression("zstd")
    except ValueError:
        pytest.skip("this Python has not this module")
    body = compressed(iter(PARTS), "zstd")
    assert zstandard.ZstdDecompressor().decompressobj().decompress(body) == b"".join(PARTS)
    assert len(body) < 200


def test_gzip_is_always_there() -> None:
    assert gzip.decompress(compressed(iter(PARTS), check_compression("gzip"))) == b"".join(PARTS)


@pytest.mark.parametrize("modules", [("no.such",)], indirect=True)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zstd", "--compression: zstd needs Python 3.14 or the package zstandard (Debian: python3-zstandard)"),
        ("lz4", "--compression: 'lz4' is not one of gzip, zstd, none"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(
    modules: None, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse([*GIVEN, name, "/var/log/*.log"])
    assert end.value.code == 2
    assert said in capsys.readouterr().err
