"""Questions about programs; source files and a log to work on."""

from __future__ import annotations

from loadtest.traffic.draw import Words
from loadtest.traffic.kinds.genre import (
    ADJECTIVES,
    NOUNS,
    NUMBERS,
    OTHERS,
    STATES,
    Document,
    Genre,
)

_CODE_WORDS: Words = {
    **NUMBERS, "noun": NOUNS, "other": OTHERS, "adjective": ADJECTIVES, "state": STATES,
    "verb": (
        "parse", "merge", "load", "split", "validate", "rank", "group", "encode", "count", "fetch",
        "filter", "collect", "round", "update", "export", "match", "resolve", "compress", "retry",
        "index", "schedule", "normalise", "compare", "drain",
    ),
    "language": (
        "Python", "Go", "Rust", "Java", "C++", "TypeScript", "C#", "Kotlin", "Swift", "Ruby",
        "Scala", "JavaScript",
    ),
    "task": (
        "drops duplicates but keeps the order", "reads a CSV file line by line",
        "finds the longest common prefix", "retries a failing call", "computes a moving average",
        "groups values by day", "returns the most frequent value", "checks a checksum",
        "splits a list into chunks", "merges overlapping intervals", "escapes HTML",
        "builds a tree from parent ids", "converts time zones", "validates IBANs",
        "walks a directory tree", "rounds prices",
    ),
    "demand": (
        "in linear time", "without recursion", "thread-safe", "with constant memory",
        "without third-party packages", "with good error messages", "as a generator",
        "in under thirty lines", "with full type annotations", "lock-free",
    ),
    "order": (
        "Review", "Document", "Write unit tests for", "Find the bugs in", "Refactor", "Simplify",
        "Explain", "Write a Go version of", "Speed up", "Add type annotations to",
    ),
    "level": ("INFO", "INFO", "INFO", "DEBUG", "WARN", "ERROR"),
    "host": ("api-1", "api-2", "worker-3", "worker-7", "db-primary", "db-replica", "cache-4"),
    "problem": (
        "connection reset by peer", "deadline exceeded", "checksum mismatch", "disk quota reached",
        "unexpected end of file", "lock held by another session", "certificate has expired",
    ),
}  # fmt: skip

CODE = Genre(
    questions=(
        "Write a $language function `${verb}_${noun}` that $task, $demand, for up to $big items.",
        "Why does `${verb}_${adjective}_${noun}` in $language fail at item $big of $other_big?",
        "How do I $verb $big ${adjective} ${noun}s in $language $demand?",
        "Write unit tests in $language for `${verb}_${noun}(${other}s, limit=$big)`, which $task.",
        "Refactor, $demand:\n```python\nfor i in range($big):\n    total += ${noun}s[i] * $n\n```",
        "Design a $language class for a cache of $big ${noun}s that live $n seconds, $demand.",
        "Which regular expression matches $noun ids like $code-$big-$n in $language?",
        "Complete this $language code, which $task:\n`${verb}_${noun}(${other}, size=$big)`",
        "Is it wise to $verb ${noun}s $demand in $language at $big requests per second?",
        "Explain `${noun}s[$n:$big:$m]` in Python and give the same in $language.",
    ),
    documents=(
        Document(
            '$order this Python module.\n\n```python\n"""${verb}_${noun}.py, version $n.$m."""\n',
            (
                "\ndef ${verb}_${adjective}_${noun}(${other}s, limit=$big):\n"
                "    found = [it for it in ${other}s if it.$state]\n"
                "    return sorted(found)[:limit]\n",
                "\ndef ${verb}_${noun}_${other}($noun, rate=0.$cents):\n"
                "    if $noun.$other is None:\n"
                '        raise ValueError("$adjective $noun")\n'
                "    return $noun.$other * (1 + rate) ** $n\n",
                "\nMAX_${noun}_${other}_$code = $big  # $adjective ones take $n ms each\n",
                "\ndef ${verb}_${other}_by_${noun}(rows):\n    groups = {}\n    for row in rows:\n"
                '        groups.setdefault(row["${noun}_id"], []).append(row["$other"])\n'
                "    return {key: sum(it) / $n for key, it in groups.items()}\n",
                "\nasync def ${verb}_remote_${noun}(client, ${other}_id):\n"
                '    reply = await client.get(f"/${noun}s/{${other}_id}?page=$n")\n'
                "    return reply.json() if reply.status == 200 else {}\n",
                "\nclass ${adjective}_${noun}_$code:\n    def __init__(self, $other, size=$big):\n"
                "        self.$other, self.size = $other, size\n",
            ),
            "```\n",
        ),
        Document(
            "```typescript\n// ${noun}.service.ts\n",
            (
                "export function ${verb}_${adjective}_${noun}(items: number[]): number {\n"
                "  return items.filter((it) => it > $big).length * $n;\n}\n",
                "export const ${noun}_${other}_$code = { limit: $big, retries: $n, "
                'state: "$state" };\n',
                "export async function ${verb}_${noun}_${other}(id: string) {\n"
                "  const reply = await http.get(`/${noun}s/` + id + `/${other}?size=$big`);\n"
                "  return reply.data.${other}s ?? [];\n}\n",
                "interface ${noun}_${adjective}_${code} {\n  ${other}_id: number;\n"
                '  state: "$state" | "draft";\n  weight: number; // at most $big\n}\n',
            ),
            "```\n$order this file $demand. Begin with a summary for the $other team.\n",
        ),
        Document(
            "What went wrong on $year-$month-$day, and how can we make sure that the service can "
            "$verb ${noun}s again? The log:\n\n",
            (
                "$hour:$minute:$second $level [$host] ${verb} ${noun} $big took $n ms\n",
                "$hour:$minute:$second $level [$host] ${noun} $code-$big: $problem (try $n)\n",
                "$hour:$minute:$second $level [$host] queue ${adjective}_${noun} holds $big\n",
            ),
        ),
    ),
    words=_CODE_WORDS,
)
