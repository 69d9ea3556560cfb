"""The latest state of HBase's cells from their changes: which changes are kept, and which one a column shows. Pure.

What a scan of HBase shows is a function of the set of all changes, as long as HBase has compacted nothing away. The
order in which they come plays no part:

* Of the versions of a column, the one with the highest timestamp counts. Of two with the same timestamp, the one with
  the higher sequence id; within an edit, the later one.
* ``delete_family`` and ``delete_column`` hide the versions up to their timestamp, ``delete_family_version`` and
  ``delete`` those with exactly this one: also versions that are written later.

`rule` keeps the changes on which that function depends: versions that nothing hides, and the deletes that no wider one
covers. So applying it to what it has kept and further changes gives what it gives for all of them at once: in batches
of any split, in any order, and if changes come again.

Versions beyond the newest ``versions`` of a column are dropped, and the newest dropped one leaves a row of the type
``dropped``. If single versions are deleted until that row is the newest, the table does not know the value: that row is
the latest then, and no other. Otherwise what is latest is what HBase shows.
"""

from __future__ import annotations

from typing import Final

DROPPED: Final = "dropped"

# In the SQL of Spark and of DuckDB. The cells have the columns t, r, f, q (table, row, family, qualifier), kind, ts,
# seq (sequence id), place (within the edit) and body. The result has ``latest``, too.
_RULE: Final = """
WITH once AS (
    SELECT * FROM (
        SELECT *, row_number() OVER (PARTITION BY t, r, f, q, kind, ts ORDER BY seq DESC, place DESC) AS copy
        FROM {cells}
    ) AS numbered WHERE copy = 1
), hidden AS (
    SELECT *,
        max(CASE WHEN kind = 'delete_family' THEN ts END) OVER (PARTITION BY t, r, f) AS family_to,
        max(CASE WHEN kind = 'delete_column' THEN ts END) OVER (PARTITION BY t, r, f, q) AS column_to,
        max(CASE WHEN kind = 'delete_family_version' THEN 1 ELSE 0 END) OVER (PARTITION BY t, r, f, ts) AS family_at,
        max(CASE WHEN kind = 'delete' THEN 1 ELSE 0 END) OVER (PARTITION BY t, r, f, q, ts) AS column_at
    FROM once
), kept AS (
    SELECT *, row_number() OVER (PARTITION BY t, r, f, q, kind ORDER BY ts DESC) AS version FROM hidden
    WHERE CASE
        WHEN kind = 'delete_family' THEN ts = family_to
        WHEN ts <= family_to THEN false
        WHEN kind = 'delete_family_version' THEN true
        WHEN kind = 'delete_column' THEN ts = column_to
        WHEN ts <= column_to THEN false
        WHEN kind = 'dropped' THEN true
        WHEN kind = 'delete' THEN family_at = 0
        ELSE family_at = 0 AND column_at = 0
    END
), cut AS (
    SELECT t, r, f, q, CASE WHEN kind = 'put' AND version > {versions} THEN 'dropped' ELSE kind END AS kind,
        ts, seq, place, body
    FROM kept
), ranked AS (
    SELECT *,
        CASE WHEN kind IN ('put', 'dropped') THEN 'version' ELSE kind END AS sort,
        row_number() OVER (
            PARTITION BY t, r, f, q, CASE WHEN kind IN ('put', 'dropped') THEN 'version' ELSE kind END
            ORDER BY ts DESC, seq DESC, place DESC, kind DESC
        ) AS rank,
        row_number() OVER (PARTITION BY t, r, f, q, kind ORDER BY ts DESC, seq DESC, place DESC) AS nth
    FROM cut
)
SELECT t, r, f, q, kind, ts, seq, place, body, sort = 'version' AND rank = 1 AS latest
FROM ranked WHERE kind <> 'dropped' OR nth = 1
"""


def rule(versions: int, cells: str) -> str:
    """The SQL, which keeps so many versions of a column. ``cells``: the name of the view that it reads."""
    return _RULE.format(versions=versions, cells=cells)
