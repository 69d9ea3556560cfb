"""The settings of a parser, from lines to columns, and the name of a parser in the ledger. Pure.

The name is format and version, with a digest where there are settings: ``json/1:3f2a9c01d4e7``. A change of which lines
are rows, or of a column's value, requires a new version of the format. The ledger keeps the settings beside the name,
so a batch that was planned before a change is finished with its own settings.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Annotated, Any, Final, Literal, get_args

from logferry.loaders.parsing.columns import TIME, check_name, column_type, named_groups
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Format = Literal["lines", "chunk", "json", "access", "logfmt", "regex", "delimited", "hbase"]

# As many versions as few programs delete one by one.
VERSIONS_KEPT: Final = 3
VERSIONS: Final[dict[str, int]] = dict.fromkeys(get_args(Format), 1)
# The settings that a format uses.
_USED: Final[dict[str, tuple[str, ...]]] = {
    "lines": (),
    "chunk": (),
    "access": ("columns", "event_time"),
    "json": ("columns", "rescued", "event_time"),
    "logfmt": ("columns", "event_time"),
    "regex": ("columns", "pattern", "event_time"),
    "delimited": ("columns", "separator", "quoted", "event_time"),
    "hbase": ("latest", "versions", "msgpack"),
}

# The columns that every row has besides the parser's.
_ROW: Final = ("topic", "source_id", "seqno", "line", "prev", "dc", "partition", "offset", "created", "recorded")
_BESIDE: Final = ("attributes", "text", "newline", "data", "event_time", "event_date", "recorded_date")
_ASIDE: Final = ("reason", "bytes", "key", "headers", "parser", "resolved", "line_text", "line_parts", "line_flaw")
RESERVED: Final = frozenset((*_ROW, *_BESIDE, *_ASIDE))

_ACCESS: Final = "remote_host ident user time request method path protocol status body_bytes referer user_agent"
ACCESS: Final = {**dict.fromkeys(_ACCESS.split(), "string"), "status": "int", "body_bytes": "bigint"}
# The changes of `logferry hbase subscribe`. Of row, family, qualifier and value the text is set or, where it would not
# be UTF-8, the column of their bytes.
HBASE: Final = {
    **dict.fromkeys(("table", "row", "family", "qualifier", "type"), "string"),
    "timestamp": "bigint",
    "value": "string",
    "sequence_id": "bigint",
    "write_time": "timestamp",
    "region": "string",
}
HBASE_BYTES: Final = ("row", "family", "qualifier", "value")
FIELDS: Final = "fields"
RESCUED: Final = "rescued"


class EventTime(BaseModel):
    """The column that holds the event time, and its formats.

    Where a text has no year, the time is the latest one at most a day after the chunk was created. Where clocks are set
    back, the earlier of two times counts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    column: str
    """The parser's column with the time, a string or a number."""
    formats: Annotated[list[str], Field(min_length=1, max_length=16)]
    """Patterns of Java's DateTimeFormatter, or `iso`, `epoch_s`, `epoch_ms`; the first one that fits counts."""
    zone: str = "UTC"
    """Time zone of texts that name none."""

    @field_validator("zone")
    @classmethod
    def _zone(cls, zone: str) -> str:
        from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

        try:
            ZoneInfo(zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(f"{zone!r} is not a time zone: UTC, Europe/Zurich, …") from None
        return zone

    @field_validator("formats")
    @classmethod
    def _formats(cls, formats: list[str]) -> list[str]:
        for text in formats:
            if not text or text.count("'") % 2:
                raise ValueError(f"{text!r} is empty, or has a quote that is not closed")
        return formats


class ParserSettings(BaseModel):
    """The parser of a table: how lines become columns."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    format: Format = "lines"
    """Format of the lines; `chunk` stores a chunk as one row without parsing it."""
    columns: dict[str, str] = {}
    """Column name → type: all columns for `json`, `logfmt` and `delimited`, else those that are not strings."""
    pattern: str | None = None
    """Java regular expression of a whole line with named groups, for `regex`."""
    separator: Annotated[str, Field(min_length=1, max_length=16)] | None = None
    """Text between two fields, for `delimited`."""
    quoted: bool = False
    """Whether fields may be quoted with `"`, for `delimited`."""
    rescued: bool = False
    """Whether keys that `columns` does not name are kept as JSON in the column `rescued`, for `json`."""
    latest: bool = False
    """Whether a second table, `<path>_latest`, has the latest state of each cell, for `hbase`."""
    versions: Annotated[int, Field(ge=1, le=1000)] = VERSIONS_KEPT
    """How many versions of a cell that table keeps, for the case that newer ones are deleted one by one."""
    msgpack: bool = True
    """Whether chunks of MessagePack are read, for `hbase`: executors need Python and the package msgpack then."""
    event_time: EventTime | None = None
    """Event time of a line (default: none; `access` has its own)."""

    @field_validator("columns")
    @classmethod
    def _columns(cls, columns: dict[str, str]) -> dict[str, str]:
        for name, kind in columns.items():
            check_name(name)
            column_type(kind)
        if len({name.lower() for name in columns}) != len(columns):
            raise ValueError("names of columns differ in more than upper and lower case")
        return columns

    @model_validator(mode="after")
    def _together(self) -> ParserSettings:
        self._check_settings()
        if self.format in ("json", "delimited", "logfmt") and not self.columns:
            raise ValueError(f"{self.format} needs columns: name → type")
        if self.format == "regex":
            self._check_pattern()
        if self.format == "access" and set(self.columns) - set(ACCESS):
            raise ValueError(f"columns of access are {', '.join(ACCESS)}")
        if self.format == "delimited" and self.quoted and (len(self.separator or "") != 1 or self.separator == '"'):
            raise ValueError("separator: must be one character other than the quote if quoted is true")
        if self.format != "json":
            for name, kind in self.columns.items():
                # A text can be read as one value only.
                if not isinstance(column_type(kind), str):
                    raise ValueError(f"columns.{name}: type {kind} is not supported for this format (only json)")
        taken = {name.lower() for name in self.kinds} & RESERVED
        if self.format == "logfmt" and FIELDS in self.columns:
            taken.add(FIELDS)
        if self.rescued and RESCUED in {name.lower() for name in self.columns}:
            taken.add(RESCUED)
        if taken:
            raise ValueError(f"columns: {', '.join(sorted(taken))} is a column of every row; choose another name")
        self._check_event_time()
        return self

    def _check_settings(self) -> None:
        """Settings that the format does not use are rejected."""
        for name in [name for name in type(self).model_fields if name != "format"]:
            if name in self.model_fields_set and name not in _USED[self.format]:
                raise ValueError(f"{name}: not a setting of the format {self.format}")
        if self.format == "delimited" and self.separator is None:
            raise ValueError("delimited needs a separator")

    def _check_pattern(self) -> None:
        if not self.pattern:
            raise ValueError("regex needs a pattern")
        groups = named_groups(self.pattern).groups
        if not groups:
            raise ValueError("pattern: has no named group (?<name>…)")
        for name in groups:
            check_name(name)
        if len({name.lower() for name in groups}) != len(groups):
            raise ValueError("pattern: names of groups differ in more than upper and lower case")
        if strange := sorted(set(self.columns) - set(groups)):
            raise ValueError(f"columns: {', '.join(strange)} is not a group of the pattern")

    def _check_event_time(self) -> None:
        if self.event_time is None:
            return
        kind = self.kinds.get(self.event_time.column)
        if kind is None:
            raise ValueError(f"event_time.column: {self.event_time.column} is not a column of the parser")
        if kind not in ("string", "bigint", "int", "double"):
            raise ValueError(
                f"event_time.column: {self.event_time.column} has type {kind}; a string or a number is needed"
            )

    @property
    def kinds(self) -> dict[str, str]:
        """The parser's columns in order: name → type."""
        if self.format == "access":
            return {**ACCESS, **self.columns}
        if self.format == "hbase":
            return HBASE
        if self.format == "regex":
            return {name: self.columns.get(name, "string") for name in named_groups(self.pattern or "").groups}
        return self.columns

    @property
    def time(self) -> EventTime | None:
        """The event time; access logs have a default."""
        if self.event_time is None and self.format == "access":
            return EventTime(column="time", formats=[TIME])
        return self.event_time

    @property
    def as_json(self) -> str:
        """The settings as in the ledger; empty where there are none."""
        said: dict[str, Any] = self.model_dump(mode="json", exclude_defaults=True, exclude={"format"})
        if said.get("columns") is not None:
            # The order of columns matters, and readers of JSON need not keep it.
            said["columns"] = list(self.columns.items())
        return json.dumps(said, sort_keys=True, ensure_ascii=False) if said else ""

    @property
    def name(self) -> str:
        # From version 2 on, a key of a map that comes twice has its last value. Without a map there is no difference.
        has_map = self.format == "json" and any("map<" in kind.replace(" ", "") for kind in self.columns.values())
        plain = f"{self.format}/{VERSIONS[self.format] + has_map}"
        return f"{plain}:{sha256(self.as_json.encode()).hexdigest()[:12]}" if self.as_json else plain


def settings_of(name: str, as_json: str) -> ParserSettings | None:
    """The settings behind a name in the ledger; None where this version parses such lines differently."""
    said: dict[str, Any] = json.loads(as_json or "{}")
    if "columns" in said:
        said["columns"] = dict(said["columns"])
    try:
        found = ParserSettings.model_validate({"format": name.partition("/")[0], **said})
    except ValueError:
        return None
    return found if found.name == name else None


LINES: Final = ParserSettings()
