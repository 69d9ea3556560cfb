"""Delta features under which this loader would write a wrong table. Pure.

A loader adds and replaces files by delta-rs. It does not read deletion vectors, evaluate constraints or expressions,
nor write row ids, clustering, commit timestamps or mapped names. A table with such a feature is refused by its name,
before the first row; so is one with a feature that is not known here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

# Harmless where no property or column below uses them.
_KNOWN: Final = {
    *("appendOnly", "invariants", "checkConstraints", "changeDataFeed", "generatedColumns", "identityColumns"),
    *("columnMapping", "timestampNtz", "allowColumnDefaults", "domainMetadata", "vacuumProtocolCheck"),
    "inCommitTimestamp",
}
# Property → feature, unless the property has one of the values.
_PROPERTIES: Final[Mapping[str, tuple[str, Collection[str]]]] = {
    "delta.enableDeletionVectors": ("deletionVectors", ("false",)),
    "delta.enableRowTracking": ("rowTracking", ("false",)),
    "delta.enableInCommitTimestamps": ("inCommitTimestamp", ("false",)),
    "delta.columnMapping.mode": ("columnMapping", ("none",)),
}
_CONSTRAINT: Final = "delta.constraints."
_COLUMNS: Final[Mapping[str, str]] = {
    "delta.generationExpression": "generatedColumns",
    "delta.identity.start": "identityColumns",
    "delta.invariants": "invariants",
}


def unsupported_features(
    features: Collection[str], properties: Mapping[str, str | None], columns: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[str]:
    """What the loader cannot keep, each with where it is used. ``columns``: names and their metadata."""
    found = {name: name for name in features if name not in _KNOWN}
    for name, value in properties.items():
        feature, harmless = _PROPERTIES.get(name, ("", ()))
        if feature and (value or "").lower() not in harmless:
            found[feature] = f"{feature} ({name}={value})"
        if name.startswith(_CONSTRAINT):
            found["checkConstraints"] = f"checkConstraints ({name.removeprefix(_CONSTRAINT)}: {value})"
    for column, metadata in columns:
        for key, feature in _COLUMNS.items():
            if key in metadata:
                found[feature] = f"{feature} (column {column})"
    return [found[name] for name in sorted(found)]
