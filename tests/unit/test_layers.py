"""The layers: which sub-package may import which, which ones are pure, and how large a sub-package may be.

The tables below are the architecture. A sub-package that is missing here fails; so does one with more than 12 modules,
a module of more than 400 lines, and a claim ("Pure.", "without Spark") that its module does not keep.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("gateway", "mirror", "loaders", "client", "ops")
MAX_MODULES = 12
MAX_LINES = 400

# {sub-package: what of ours it may import besides itself}. "gateway" alone means the modules directly in that folder.
ALLOWED: dict[str, tuple[str, ...]] = {
    "gateway.contract": (),
    "gateway": ("gateway.access", "gateway.contract", "gateway.kafka", "gateway.service"),
    "gateway.access": ("gateway", "gateway.contract"),
    "gateway.kafka": ("gateway", "gateway.contract"),
    "gateway.topics": ("gateway", "gateway.contract", "gateway.kafka"),
    "gateway.lanes": ("gateway", "gateway.contract", "gateway.kafka", "gateway.topics"),
    "gateway.reading": ("gateway", "gateway.contract", "gateway.kafka", "gateway.topics"),
    "gateway.http": ("gateway", "gateway.access", "gateway.contract"),
    "gateway.reports": (
        *("gateway", "gateway.access", "gateway.contract", "gateway.kafka", "gateway.topics", "gateway.http"),
    ),
    "gateway.admin_log": (
        *("gateway", "gateway.access", "gateway.contract", "gateway.kafka", "gateway.topics", "gateway.http"),
    ),
    "gateway.api": (
        *("gateway", "gateway.access", "gateway.admin_log", "gateway.contract", "gateway.kafka", "gateway.reports"),
        *("gateway.topics", "gateway.lanes", "gateway.reading", "gateway.http"),
    ),
    "gateway.console": ("gateway", "gateway.http"),
    "gateway.receivers": (
        *("gateway", "gateway.access", "gateway.contract", "gateway.kafka", "gateway.topics"),
        *("gateway.lanes", "gateway.http", "gateway.api"),
    ),
    "gateway.service": (
        *("gateway", "gateway.contract", "gateway.kafka", "gateway.topics"),
        *("gateway.lanes", "gateway.reading", "gateway.http", "gateway.api", "gateway.receivers"),
        *("gateway.access", "gateway.admin_log", "gateway.console", "gateway.reports"),
    ),
    "gateway.delivery": (
        *("gateway", "gateway.contract", "gateway.kafka", "gateway.topics"),
        *("gateway.lanes", "gateway.reading", "gateway.http", "gateway.service"),
    ),
    "mirror.copy": ("gateway.contract", "gateway.kafka"),
    "mirror.lanes": (
        *("mirror", "mirror.copy"),
        *("gateway", "gateway.contract", "gateway.kafka", "gateway.topics", "gateway.lanes"),
    ),
    "mirror": (
        *("mirror.copy", "mirror.lanes", "gateway", "gateway.contract", "gateway.kafka"),
        *("gateway.topics", "gateway.lanes", "gateway.service", "gateway.http"),
    ),
    "loaders.planning": ("loaders", "loaders.parsing", "gateway.contract"),
    "loaders.storage": ("loaders", "loaders.planning"),
    "loaders.parsing": ("loaders",),
    "loaders.spark": ("loaders", "loaders.planning", "gateway", "gateway.contract"),
    "loaders.batches": (
        *("loaders", "loaders.planning", "loaders.storage", "loaders.parsing", "loaders.spark"),
        *("gateway", "gateway.contract", "gateway.kafka", "gateway.topics"),
    ),
    "loaders.runs": (
        *("loaders", "loaders.batches", "loaders.planning", "loaders.storage", "loaders.parsing", "loaders.spark"),
        *("gateway.contract", "client.transport"),
    ),
    "loaders.commands": (
        *("loaders", "loaders.runs", "loaders.batches", "loaders.planning", "loaders.storage", "loaders.parsing"),
        *("loaders.spark", "gateway.contract"),
    ),
    "loaders.query": (
        *("loaders", "loaders.batches", "loaders.planning", "loaders.storage", "loaders.parsing", "loaders.spark"),
        *("gateway", "gateway.contract", "client", "client.reading", "client.transport"),
    ),
    "loaders.submit": ("loaders", "loaders.commands"),
    "loaders": ("loaders.commands", "loaders.planning", "loaders.parsing", "gateway", "gateway.contract"),
    "client.transport": ("client", "gateway.contract"),
    "client.files": ("client", "gateway.contract"),
    "client.inputs": ("client", "client.files", "gateway.contract"),
    "client.agent": ("client", "client.files", "client.inputs", "client.transport", "gateway.contract"),
    "client.writing": ("client", "client.files", "client.transport", "gateway.contract"),
    "client.reading": ("client", "client.transport", "gateway.contract"),
    "client.aio": ("client", "client.transport", "client.reading", "client.writing", "gateway.contract"),
    # Of "gateway" the table of problems, which is as light as the contract.
    "client.testing": ("client.reading", "gateway", "gateway.contract"),
    "client.hbase": ("client", "client.transport", "gateway.contract"),
    "client.hbase.wal": ("client", "client.hbase", "client.transport", "gateway.contract"),
    "client": ("client.agent", "client.aio", "client.reading", "client.writing"),
}
# Operators' side: everything of the four products, and of ops what stands here.
OPS: dict[str, tuple[str, ...]] = {
    "ops.cli": (),
    "ops.runtime": ("ops.cli",),
    "ops.stack": ("ops.cli", "ops.runtime"),
    "ops.commands": ("ops.cli", "ops.runtime", "ops.stack", "ops.audit.log", "ops.audit.tables"),
    "ops.generate": (),
    "ops.capacity": (),
    "ops.audit.digests": (),
    "ops.audit.records": (),
    "ops.audit.workers": ("ops.cli",),
    "ops.audit.log": ("ops.audit.digests", "ops.audit.records", "ops.cli"),
    "ops.audit.tables": ("ops.audit.digests", "ops.cli"),
    "ops.audit.compare": (
        *("ops.audit.digests", "ops.audit.records", "ops.audit.log", "ops.audit.tables", "ops.audit.workers"),
        "ops.cli",
    ),
    "ops.audit": (
        *("ops.audit.digests", "ops.audit.records", "ops.audit.log", "ops.audit.tables", "ops.audit.workers"),
        *("ops.audit.compare", "ops.cli"),
    ),
    "ops.status": ("ops.cli",),
    "ops.doctor": ("ops.cli", "ops.runtime", "ops.audit", "ops.keeper"),
    "ops.keeper": ("ops.cli", "ops.keeper.planning"),
    "ops.keeper.planning": (),
    "ops.demo": (
        *("ops.cli", "ops.runtime", "ops.stack", "ops.audit", "ops.audit.compare", "ops.audit.digests"),
        *("ops.generate", "ops.status"),
    ),
    "ops.bench": ("ops.bench.suites", "ops.bench.harness", "ops.cli", "ops.runtime", "ops.stack"),
    "ops.bench.harness": ("ops.cli", "ops.runtime", "ops.stack"),
    "ops.bench.suites": ("ops.bench.harness", "ops.cli", "ops.runtime", "ops.stack", "ops.generate"),
    "ops": ("ops.cli",),
}

# `errors` are names only.
AIOKAFKA_PURE = ("aiokafka.record", "aiokafka.protocol", "aiokafka.codec", "aiokafka.errors")
IO = ("asyncio", "aiohttp", "socket", "subprocess", "threading", "time", "random", "os", "pathlib", "uvloop")
# Sub-packages and modules that decide and touch nothing: no I/O, no clock, no random numbers.
PURE = (
    *("gateway.contract", "gateway.kafka.types", "gateway.kafka.record_batch", "gateway.kafka.record_requests"),
    *("gateway.access.rights", "gateway.admin_log.records", "gateway.service.lane_states"),
    *("gateway.lanes.transaction", "gateway.lanes.dedup", "gateway.lanes.source_index"),
    *("gateway.http.request", "gateway.http.shared_limits", "gateway.http.shares"),
    *("gateway.lanes.receipts", "gateway.lanes.resolution", "gateway.lanes.uploads"),
    *("gateway.receivers.bulk", "gateway.receivers.hec"),
    *("gateway.receivers.otlp", "gateway.receivers.otlp_protobuf"),
    *(
        "gateway.reading.assignment",
        "gateway.reading.formats",
    ),
    "gateway.limits",
    *(
        "gateway.subscriptions",
        "gateway.reports.tables",
        "gateway.reports.hbase",
        "gateway.delivery.batch",
        "gateway.delivery.progress",
    ),
    "mirror.copy",
    *("loaders.planning", "loaders.parsing.settings", "loaders.parsing.columns", "loaders.parsing.hbase_events"),
    *("client.inputs.syslog_message", "client.inputs.journal_export"),
    *("client.files.chunking", "client.files.containers", "client.files.lines"),
    *("client.transport.source_request", "client.transport.request_window"),
    *("client.agent.schedule", "client.transport.failover"),
    *("client.writing.send_window", "client.reading.requests"),
    *("client.reading.prefetch", "client.reading.duplicates"),
    *("client.hbase.messages", "client.hbase.cells", "client.hbase.frames", "client.hbase.changes"),
    "client.hbase.definition",
    *("client.hbase.wal.entries", "client.hbase.wal.region_order", "client.hbase.wal.file_names"),
    *("ops.audit.digests", "ops.audit.records"),
    *("ops.audit.log.chain", "ops.audit.log.partition", "ops.audit.log.agreement"),
    "ops.audit.tables.accepted_resets",
    "ops.audit.tables.rows",
    "gateway.api.diagnosis",
    "ops.capacity.plan",
    *("ops.keeper.planning", "ops.keeper.admin_requests"),
)
# A pure module may hold paths as values; the heartbeats of sources are spread at random.
ALSO = {
    "loaders.planning.ledger_entry": {"pathlib"},
    "client.agent.schedule": {"random"},
    "client.transport.failover": {"random"},
}
# What runs where pyspark is not installed, and what the push-client's one file holds.
WITHOUT_SPARK = (
    *("loaders.storage", "loaders.planning", "loaders.parsing.settings", "loaders.config"),
    *("loaders.commands.table", "loaders.commands.inspection", "loaders.commands.compact"),
)
# The client needs the standard library alone, but for these.
EXTRAS = {
    "client.aio": {"aiohttp", "yarl"},
    "client.reading.decode": {"msgpack"},
    "client.hbase": {"google", "kazoo", "msgpack"},
}


def modules() -> list[str]:
    """All modules that hold code, as ``gateway.lanes.dedup``; a package counts where its ``__init__`` holds code."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            # The samples for other programs are no modules of ours.
            if path.parent.name != "deploy" and path.read_text(encoding="utf-8").strip():
                found.append(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    return found


def path_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def package_of(module: str) -> str:
    """The sub-package that a module is in; a package is in itself."""
    return module if path_of(module).name == "__init__.py" else module.rpartition(".")[0]


def imported(path: Path) -> Iterator[str]:
    """The full names of what a file imports, also inside of functions; `from a import b` counts as a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(module: str) -> Iterator[str]:
    """The sub-packages of ours that a module imports from."""
    known = set(MODULES)
    packages = {package_of(name) for name in known}
    for name in imported(path_of(module)):
        if name.startswith("logferry."):
            plain = name.removeprefix("logferry.")
            if plain not in known and plain not in packages:
                plain = plain.rpartition(".")[0]
            yield plain if plain in packages and plain not in known else package_of(plain)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


MODULES = modules()


@pytest.mark.parametrize("package", sorted({package_of(name) for name in MODULES}))
def test_a_package_imports_what_its_layer_allows(package: str) -> None:
    allowed = {package, *ALLOWED.get(package, ()), *OPS.get(package, ())}
    assert package in ALLOWED or package in OPS, f"{package}: name it in ALLOWED, with what it may import"
    if package in OPS:
        allowed |= set(ALLOWED)
    found = {
        f"{module} imports {other}"
        for module in MODULES
        if package_of(module) == package
        for other in ours(module)
        if other not in allowed
    }
    assert not found


def test_the_tables_name_only_what_exists() -> None:
    packages = {package_of(name) for name in MODULES}
    assert {*ALLOWED, *OPS} == packages | {"loaders.submit", "ops"}
    assert [name for name in PURE if name not in MODULES and name not in packages] == []


@pytest.mark.parametrize("package", sorted({package_of(name) for name in MODULES}))
def test_a_package_has_at_most_twelve_modules(package: str) -> None:
    names = [name for name in MODULES if package_of(name) == package and name != package]
    assert len(names) <= MAX_MODULES, names


def test_a_module_has_at_most_400_lines() -> None:
    sizes = {name: len(path_of(name).read_text(encoding="utf-8").splitlines()) for name in MODULES}
    assert {name: size for name, size in sizes.items() if size > MAX_LINES} == {}


def test_a_module_is_named_by_a_noun() -> None:
    """No gerunds and participles; `parsing`, `planning`, `reading`, `testing` and `writing` are the field's words."""
    field = {"parsing", "planning", "reading", "testing", "writing", "forwarding"}
    names = {name.rpartition(".")[2] for name in MODULES} - field
    assert {
        name for name in names if name.endswith("ing") and name not in ("chunking", "structured_streaming")
    } == set()


def is_pure(module: str) -> bool:
    return within(module, *PURE)


@pytest.mark.parametrize("module", [name for name in MODULES if is_pure(name)])
def test_what_decides_does_no_io_and_has_no_clock(module: str) -> None:
    names = list(imported(path_of(module)))
    allowed = ALSO.get(module, set())
    assert [name for name in names if within(name, *IO) and name.partition(".")[0] not in allowed] == []
    assert [name for name in names if within(name, "pyspark", "deltalake", "pyarrow")] == []
    assert [n for n in names if within(n, "aiokafka") and not within(n, *AIOKAFKA_PURE)] == []


# What decodes stored records for the gateway and its clients. A value that one of them defines is no decoder.
DECODERS = (
    *("gateway.kafka.record_batch", "gateway.contract.chunk", "gateway.contract.source_state"),
    *("gateway.contract.varint", "client.reading.decode", "mirror.copy"),
    *(f"gateway.kafka.aiokafka_internals.{one}" for one in ("ControlRecord", "DefaultRecordBatchBuilder")),
    "gateway.kafka.aiokafka_internals.MemoryRecords",
)
VALUES = ("client.reading.decode.ReceivedChunk",)


@pytest.mark.parametrize("module", [name for name in MODULES if within(name, "ops.audit")])
def test_the_audit_decodes_nothing_with_what_it_judges(module: str) -> None:
    names = [name.removeprefix("logferry.") for name in imported(path_of(module))]
    assert [name for name in names if within(name, *DECODERS) and name not in VALUES] == []
    assert [name for name in names if within(name, "aiokafka.record")] == []
    assert module != "ops.audit.records.batches" or not [name for name in names if within(name, *FOLDERS, "aiokafka")]


# The documented interface of aiokafka: what else it has may change with each of its versions.
AIOKAFKA = {
    *("aiokafka.AIOKafkaConsumer", "aiokafka.AIOKafkaProducer", "aiokafka.ConsumerRebalanceListener"),
    *("aiokafka", "aiokafka.TopicPartition", "aiokafka.errors", "aiokafka.structs.TopicPartition"),
    "aiokafka.abc.AbstractTokenProvider",
}
INTERNALS = "gateway.kafka.aiokafka_internals"


@pytest.mark.parametrize("module", [name for name in MODULES if name != INTERNALS])
def test_one_module_alone_knows_the_inside_of_aiokafka(module: str) -> None:
    names = [name for name in imported(path_of(module)) if within(name, "aiokafka")]
    assert [name for name in names if name not in AIOKAFKA and not within(name, "aiokafka.errors")] == []


def test_one_module_alone_touches_private_attributes_of_aiokafka() -> None:
    """Any attribute that begins with an underscore and belongs to a client, consumer, producer or connection."""
    found = [
        f"{module}: {ast.unparse(node)}"
        for module in MODULES
        if module != INTERNALS and "aiokafka" in path_of(module).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(path_of(module).read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr)
        if re.fullmatch(r".*(client|consumer|producer|connection|coordinator|fetcher)", ast.unparse(node.value))
    ]
    assert found == []


def test_a_module_that_calls_itself_pure_is_tested_as_pure() -> None:
    claims = [
        name
        for name in MODULES
        if re.search(r"\bPure\b|\bNo I/O\b|no clock", (ast.get_docstring(ast.parse(path_of(name).read_text())) or ""))
    ]
    assert [name for name in claims if not is_pure(name)] == []


@pytest.mark.parametrize("module", [name for name in MODULES if within(name, *WITHOUT_SPARK)])
def test_the_storage_of_tables_needs_no_spark(module: str) -> None:
    program = f"import sys; sys.modules['pyspark'] = sys.modules['py4j'] = None; import logferry.{module}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    "module",
    [
        name
        for name in MODULES
        if within(name, "client", *(f"gateway.contract.{one}" for one in ("names", "chunk", "syslog_frames")))
    ],
)
def test_the_client_needs_the_standard_library_alone(module: str) -> None:
    others = {
        name.partition(".")[0] for name in imported(path_of(module)) if not within(name, "logferry", "__future__")
    }
    allowed = EXTRAS.get(package_of(module), set()) | EXTRAS.get(module, set())
    assert others <= {*sys.stdlib_module_names, *allowed}


@pytest.mark.parametrize("name", ["Writer", "Reader", "LogferryHandler"])
def test_the_plain_faces_load_nothing_that_is_to_be_installed(name: str) -> None:
    loaded = "{'asyncio', 'aiohttp', 'msgpack'} & {*sys.modules}"
    program = f"import sys; from logferry.client import {name}; print(*({loaded}))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_the_fake_gateway_loads_nothing_that_is_to_be_installed() -> None:
    program = "import sys, logferry.client.testing; print(*sorted({one.partition('.')[0] for one in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    installed = {"aiohttp", "aiokafka", "cramjam", "msgpack", "multidict", "prometheus_client", "pydantic"}
    assert installed & {*run.stdout.split()} == set()


@pytest.mark.parametrize("name", ["AsyncWriter", "AsyncReader"])
def test_an_asyncio_face_says_what_it_needs(name: str) -> None:
    program = f"import sys; sys.modules['aiohttp'] = None; from logferry.client import {name}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert f"{name} needs aiohttp: pip install 'logferry[client]'" in run.stderr


@pytest.mark.parametrize(
    "module", ["contract.chunk", "contract.source_state", "lanes.dedup", "lanes.transaction", "errors"]
)
def test_what_decides_loads_no_client_of_anything(module: str) -> None:
    """Not by a detour, either."""
    program = (
        f"import sys, logferry.gateway.{module}; print(*({{'asyncio', 'aiohttp', 'aiokafka'}} & {{*sys.modules}}))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
