"""What the README shows of the configuration is accepted as it stands there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from logferry.gateway.config import Config
from logferry.mirror.config import MirrorConfig

README = Path(__file__).parents[2] / "README.md"


def shown(start: str) -> dict[str, Any]:
    """The indented block that has the line."""
    blocks = re.findall(r"(?:^    .*\n)+", README.read_text(encoding="utf-8"), re.MULTILINE)
    (block,) = (block for block in blocks if f"    {start}" in block)
    text = "\n".join(line[4:] for line in block.splitlines())
    return tomllib.loads(text.replace('"…"', f'"{"0" * 64}"'))


def test_the_configuration_of_the_readme() -> None:
    base, tokens, secured = shown('listen = "127.0.0.1:8080"'), shown("[[tokens]]"), shown("[tls]")
    base["kafka"] |= secured.pop("kafka")
    config = Config.model_validate(base | tokens | secured)
    assert config.url(1) == "https://127.0.0.1:8081"
    assert config.kafka.security_protocol == "SASL_SSL"
    assert [token.name for token in config.tokens] == ["web-hosts"]
    assert config.quotas[0].bytes_per_s == 10_000_000
    assert config.graphite is not None


def test_the_configuration_of_the_mirror() -> None:
    config = MirrorConfig.model_validate(shown('listen = "127.0.0.1:8180"'))
    assert config.url(0) == "http://127.0.0.1:8180"
    assert [(remote.dc, remote.bytes_per_s) for remote in config.remotes] == [("dc1", 50_000_000)]
