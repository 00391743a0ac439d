"""Questions about databases; a schema, an export and slow statements to work on."""

from __future__ import annotations

from loadtest.traffic.kinds.genre import (
    ADJECTIVES,
    NOUNS,
    NUMBERS,
    OTHERS,
    STATES,
    Document,
    Genre,
)

SQL = Genre(
    questions=(
        "Write a SQL query that returns the top $n ${noun}s by $column since $year-$month-$day.",
        "Why is this slow with $big million rows?\nSELECT $column, COUNT(*) FROM ${noun}s "
        "WHERE ${other}_id = $other_big GROUP BY $column;",
        "Which index helps SELECT * FROM ${noun}s WHERE $column = '$state' AND ${other}_id > $big?",
        "In $dialect, delete duplicate ${noun}s with the same $column but keep the newest $n.",
        "Write a $dialect window function: $measure of $column per ${other}, last $n days.",
        "How do I join ${noun}s with ${other}s on ${other}_id in $dialect and keep the $n oldest "
        "since $year-$month-$day?",
        "Add a foreign key from ${noun}s.${other}_id to ${other}s in $dialect; it has $big rows.",
        "Rewrite without a subquery: UPDATE ${noun}s SET $column = $big WHERE id IN "
        "(SELECT ${noun}_id FROM ${other}s);",
        "In $dialect, pivot ${noun}s to one column per state for the $n weeks after "
        "$year-$month-$day.",
        "Explain: Seq Scan on ${noun}s (cost=0.00..$big.$cents) Filter: ($column > $other_big)",
    ),
    documents=(
        Document(
            "This is our $dialect schema.\n\n```sql\n",
            (
                "CREATE TABLE ${adjective}_${noun}_$code (\n  id BIGINT PRIMARY KEY,\n"
                "  ${other}_id BIGINT NOT NULL,\n  $column NUMERIC($n, 2),\n"
                "  state VARCHAR($m) DEFAULT '$state'\n);\n",
                "CREATE INDEX ${noun}_${column}_$code ON ${noun}s ($column, ${other}_id);\n",
                "ALTER TABLE ${noun}s ADD COLUMN ${adjective}_${other}_$code INTEGER "
                "DEFAULT $big;\n",
                "CREATE VIEW ${adjective}_${noun}s_$code AS\n"
                "  SELECT id, $column FROM ${noun}s WHERE ${other}_id < $big;\n",
            ),
            "```\nWrite a query for the $measure of $column per $other and month.\n",
        ),
        Document(
            "Load this export into $dialect and write a query for the $measure of the price by "
            "state.\n\nid,${noun},date,price,state\n",
            ("$index,$code-$big,$year-$month-$day,$n.$cents,$state\n",),
        ),
        Document(
            "These are the slowest statements of $year-$month-$day in $dialect. Which indexes do "
            "you suggest, and which statements would you rewrite?\n\n",
            (
                "-- $big ms\nSELECT * FROM ${noun}s WHERE $column > $other_big "
                "ORDER BY ${other}_id;\n",
                "-- $big ms\nUPDATE ${noun}s SET $column = $n WHERE ${other}_id IN "
                "(SELECT id FROM ${other}s WHERE state = '$state');\n",
                "-- $big ms\nSELECT ${other}_id, SUM($column) FROM ${noun}s\nGROUP BY ${other}_id "
                "HAVING COUNT(*) > $n;\n",
            ),
        ),
    ),
    words={
        **NUMBERS, "noun": NOUNS, "other": OTHERS, "adjective": ADJECTIVES, "state": STATES,
        "column": (
            "amount", "country", "created_at", "weight", "priority", "discount", "region", "score",
            "currency", "quantity", "price", "channel", "tax", "duration", "rating",
        ),
        "dialect": ("PostgreSQL", "MySQL", "SQLite", "SQL Server", "Oracle", "DuckDB"),
        "measure": (
            "average", "median", "sum", "running total", "rank", "growth", "share", "maximum",
        ),
    },
)  # fmt: skip
