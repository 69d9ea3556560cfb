"""What the README shows of the configuration is accepted as it stands there."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import logferry.client
from logferry.gateway.config import Config
from logferry.loaders.config import Config as LoaderConfig
from logferry.loaders.config import GatewayAccess, SegmentSettings
from logferry.loaders.planning.segment_states import Rules
from logferry.mirror.config import MirrorConfig
from logferry.ops.audit.config import AuditConfig

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


def test_the_configuration_of_the_audit() -> None:
    config = AuditConfig.model_validate(shown('keep = "/var/lib/logferry/audit.kept"'))
    assert [(copy.dc, copy.kafka.bootstrap_servers) for copy in config.copies] == [("dc2", "kafka2:9092")]
    assert (config.dc, config.tables) == ("dc1", [Path("/warehouse/nginx")])


def test_the_programs_of_the_readme_name_what_there_is() -> None:
    """Every block that imports the library is Python, and its names and keyword arguments are known."""
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", README.read_text(encoding="utf-8"), re.MULTILINE)
    programs = [ast.parse(textwrap.dedent(block)) for block in blocks if "from logferry.client import" in block]
    assert len(programs) == 3
    for program in programs:
        names = [alias.name for node in ast.walk(program) if isinstance(node, ast.ImportFrom) for alias in node.names]
        for name in names:
            assert hasattr(logferry.client, name)
        for call in ast.walk(program):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in names:
                known = inspect.signature(getattr(logferry.client, call.func.id)).parameters
                assert {keyword.arg for keyword in call.keywords} <= known.keys()


def test_the_configuration_of_the_loader() -> None:
    settings = shown('path = "/warehouse/nginx"')
    nginx, orders = LoaderConfig.model_validate(settings).tables
    assert nginx.partition_by == ["event_date"]
    assert nginx.parser.time is not None
    assert orders.parser.name.startswith("json/1:")


def test_the_segments_of_the_readme() -> None:
    settings = shown("[tables.segments]")
    segments = SegmentSettings.model_validate(settings["tables"]["segments"])
    assert segments.rules == Rules(), "what is shown is what there is without it"
    assert GatewayAccess.model_validate(settings["gateways"]["dc1"]).token_file is not None
