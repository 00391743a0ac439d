"""Traces of conversations: made ones with labels, and an operator's own log.

A trace is a JSON object a line, one turn each, in the order of arrival. ``session`` and ``tenant``
are optional, and either ``text`` (the user's message) or ``messages`` (the whole chat up to it, as
in a request) is not. ``topic`` and ``is_switch`` are labels, for those who judge a detector. Other
fields are ignored: logs have times and more.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

from deepseek_flash.contract import InvalidField
from deepseek_flash.dspark.prompt import parse_messages

from loadtest.jsonl import field_value, read_lines


@dataclass(frozen=True, slots=True)
class Event:
    """One turn of one session."""

    text: str  # what the user wrote
    session: str = ""  # "": a turn of no session
    turn: int = 0  # of its session, from 0
    tenant: str = ""
    topic: str | None = None
    is_switch: bool | None = None  # another topic than the session's turn before
    history: tuple[tuple[str, str], ...] | None = None  # (role, content) before ``text``, if known


class TraceError(ValueError):
    """A line of a trace that cannot be read: path, line number, field and what is wrong."""


TEMPLATES: dict[str, tuple[str, ...]] = {
    "code": (
        "Write a Python function `$name` that $task. Include type hints.",
        "Why does this raise an error?\n```python\ndef $name(items):\n    return items[$n].$field"
        "\n```",
        "Refactor this so that it $quality:\n```python\nfor i in range(len($field)):\n"
        "    total = total + $field[i]\n```",
        "Add unit tests for `$name`, which $task.",
        "```rust\nfn $name(values: &[u64]) -> Option<u64> {\n    values.iter().max().copied()\n}\n"
        "```\nPlease make it generic so that it $quality.",
        "Translate this JavaScript into Go:\n```js\nconst $name = $field => $field.map(x => x + $n)"
        "\n```",
        "Implement a class `Cache` with a limit of $n items that $quality; it $task.",
        "My C program crashes in `$name`:\n```c\nint *$field = malloc($n);\n$field[$n] = 0;\n```\n"
        "What is wrong?",
        "Complete this function, which $task:\n```python\ndef $name($field: list) -> int:\n```",
    ),
    "chinese": (
        "请介绍一下$place的历史和文化。", "为什么$thing这么受欢迎？请用三句话说明。",
        "我想去$place旅游$n天，请帮我安排行程。", "$thing对身体有什么好处和坏处？",
        "请用简单的语言给孩子解释什么是$idea。", "$idea和日常生活有什么关系？请举两个例子。",
        "在$place过春节有哪些传统习俗？", "如何在家里自己做$thing？需要准备哪些材料？",
        "请比较$place和上海的生活成本。", "学习$idea应该从哪本书开始？",
    ),
    "sql": (
        "Write a SQL query that returns the top $n customers by $column from $table.",
        "SELECT $column, COUNT(*) FROM $table GROUP BY $column HAVING COUNT(*) > $n;\nWhy is this "
        "query slow?",
        "CREATE TABLE $table (id INTEGER PRIMARY KEY, $column TEXT NOT NULL);\nAdd an index and a "
        "foreign key to customers.",
        "How do I join $table with customers on $column and keep rows without a match?",
        "Write a PostgreSQL window function that ranks rows of $table by $column per month.",
        "UPDATE $table SET $column = NULL WHERE id IN (SELECT id FROM archive);\nRewrite this "
        "without the subquery.",
        "Which index helps SELECT * FROM $table WHERE $column = $n ORDER BY created_at DESC?",
        "Delete duplicate rows of $table that share the same $column, keeping the newest $n.",
        "Explain the query plan: Seq Scan on $table (cost=0.00..$n.00) Filter: ($column IS NULL)",
    ),
    "email": (
        "Write a polite email to $person declining the invitation to $event.",
        "Draft a short email asking $person to move $event to $day.",
        "Please write a thank-you email to $person after $event.",
        "Reply to this message: 'Dear team, $event is now on $day. Best regards, $person'",
        "Compose an email that reminds $person of the overdue invoice for $event.",
        "Write an apology to $person: I will miss $event on $day. Keep it formal.",
        "Draft an email to all staff announcing $event on $day, signed by $person.",
        "Make this email friendlier: 'Send me the agenda of $event by $day.' It goes to $person.",
        "Write an out-of-office reply until $day and name $person as my deputy.",
    ),
    "poem": (
        "Write a short poem about $scene in the style of $poet.",
        "Compose a haiku about $scene and $feeling.",
        "Write four rhyming lines in which $scene speaks of $feeling.",
        "Continue this verse: 'O $scene, how soft falls the night, and $feeling fades with light'",
        "Write a sonnet that compares $feeling to $scene.",
        "Give me a lullaby about $scene, gentle and full of $feeling.",
        "Write a limerick about $poet watching $scene.",
        "Turn $feeling into free verse with images of $scene, as $poet might.",
        "Write an elegy for $scene, beginning with the word 'Once', heavy with $feeling.",
    ),
}  # fmt: skip
FOLLOW_UPS: dict[str, tuple[str, ...]] = {
    "code": ("Now rename it to `$name` and handle an empty list.", "Add a docstring, please."),
    "chinese": ("请再详细一点。", "可以换一种说法吗？最好提到$place。"),
    "sql": ("Now sort the result by $column.", "How would that look in MySQL?"),
    "email": ("Make it shorter and mention $day.", "Use a warmer closing, please."),
    "poem": ("Make the second stanza sadder.", "Now rhyme every line and add $scene."),
}
SLOTS: dict[str, dict[str, tuple[str, ...]]] = {
    "code": {
        "name": ("parse_log", "merge_sorted", "flatten", "retry", "chunked", "find_cycle"),
        "task": ("removes duplicates but keeps the order", "reads a CSV file line by line",
                 "finds the longest common prefix", "retries a call three times",
                 "counts words in a text"),
        "field": ("values", "prices", "nodes", "rows"),
        "quality": ("runs in linear time", "is thread-safe", "uses less memory"),
        "n": ("3", "16", "64", "100"),
    },
    "chinese": {
        "place": ("北京", "成都", "西安", "杭州", "广州", "苏州"),
        "thing": ("火锅", "绿茶", "太极拳", "豆腐", "饺子", "中药"),
        "idea": ("光合作用", "通货膨胀", "人工智能", "相对论", "区块链"),
        "n": ("两", "三", "五", "七"),
    },
    "sql": {
        "table": ("orders", "payments", "shipments", "invoices", "visits"),
        "column": ("customer_id", "amount", "country", "status", "created_at"),
        "n": ("5", "10", "50", "1000"),
    },
    "email": {
        "person": ("Ms Weber", "Professor Lin", "my landlord", "the HR team", "Mr Okafor"),
        "event": ("the quarterly review", "the product launch", "the interview", "the workshop",
                  "the board dinner"),
        "day": ("Monday", "Thursday at noon", "the 3rd of May", "next week"),
    },
    "poem": {
        "scene": ("the autumn rain", "an old lighthouse", "the winter moon", "a paper boat",
                  "the empty station"),
        "feeling": ("longing", "quiet joy", "grief", "hope", "first love"),
        "poet": ("Emily Dickinson", "Li Bai", "Walt Whitman", "Basho"),
    },
}  # fmt: skip
TOPICS = tuple(TEMPLATES)


def generate(
    seed: int,
    sessions: int = 80,
    turns: int = 12,
    switch_probability: float = 0.15,
    repeat_share: float = 0.4,
    *,
    follow_up_share: float = 0.15,
    zipf: float = 1.0,
    tenants: int = 1,
    active: int = 8,
) -> list[Event]:
    """A labelled trace, the same for the same arguments.

    Args:
        turns: of every session.
        switch_probability: of another topic than before, a turn after the first.
        repeat_share: of the turns, where its tenant was asked anything on the topic before; the
            k-th oldest question is chosen with a weight of k ** -zipf.
        follow_up_share: of the other turns that stay on their topic: texts that say little alone.
        active: sessions that are open at a time, their turns interleaved at random.
    """
    source = random.Random(seed)
    asked: dict[tuple[str, str], list[str]] = {}  # tenant and topic -> questions, oldest first
    waiting = [f"session-{number}" for number in reversed(range(sessions))]
    tenant_of = {name: f"tenant-{i % tenants}" for i, name in enumerate(reversed(waiting))}
    turn_of, topic_of = dict.fromkeys(tenant_of, 0), dict[str, str]()
    is_open: list[str] = []
    events = []
    while waiting or is_open:
        while waiting and len(is_open) < active:
            is_open.append(waiting.pop())
        session = source.choice(is_open)
        tenant, turn, before = tenant_of[session], turn_of[session], topic_of.get(session)
        topic = before
        if topic is None or source.random() < switch_probability:
            topic = source.choice([name for name in TOPICS if name != before])
        switch = before is not None and topic != before
        known = asked.setdefault((tenant, topic), [])
        if known and source.random() < repeat_share:
            weights = [rank**-zipf for rank in range(1, len(known) + 1)]
            text = source.choices(known, weights)[0]
        else:
            follow_up = topic == before and source.random() < follow_up_share
            text = _fill(source, topic, (FOLLOW_UPS if follow_up else TEMPLATES)[topic])
            if text not in known:
                known.append(text)
        events.append(Event(text, session, turn, tenant, topic, switch))
        turn_of[session], topic_of[session] = turn + 1, topic
        if turn + 1 == turns:
            is_open.remove(session)
    return events


def _fill(source: random.Random, topic: str, templates: tuple[str, ...]) -> str:
    values = {name: source.choice(words) for name, words in SLOTS[topic].items()}
    return Template(source.choice(templates)).substitute(values)


def write_jsonl(path: Path, events: Iterable[Event]) -> None:
    """Write a trace that ``read_jsonl`` reads back as it was."""
    with path.open("w", encoding="utf-8") as file:
        for event in events:
            line = asdict(event)
            del line["turn"], line["history"]
            if event.history is not None:
                turns = [*event.history, ("user", line.pop("text"))]
                line["messages"] = [{"role": role, "content": text} for role, text in turns]
            known = {name: value for name, value in line.items() if value is not None}
            file.write(json.dumps(known, ensure_ascii=False) + "\n")


def read_jsonl(path: Path) -> list[Event]:
    """Read a trace. Empty lines are passed over, the turns of a session are counted.

    Raises:
        TraceError: naming the first line that is wrong.
        OSError: the file cannot be read.
    """
    turns: Counter[tuple[str, str]] = Counter()
    events = []
    for event in read_lines(path, _event, TraceError):
        session = event.tenant, event.session
        events.append(replace(event, turn=turns[session] if event.session else 0))
        turns[session] += 1
    return events


def _event(line: dict[str, Any]) -> Event:
    """Raises InvalidField."""
    session, tenant = (
        field_value(line, "session", str) or "",
        field_value(line, "tenant", str) or "",
    )
    text, history = field_value(line, "text", str), None
    if ("messages" in line) is (text is not None):
        raise InvalidField("text", "a line must have text or messages, and not both")
    if text is None:
        messages = parse_messages(json.dumps(line["messages"]))
        if messages[-1]["role"] != "user":
            raise InvalidField("messages", "the last must be the user's")
        *history, (_, text) = [(message["role"], message["content"]) for message in messages]
    if not text:
        raise InvalidField("messages" if history is not None else "text", "must not be empty")
    return Event(
        text, session, 0, tenant, field_value(line, "topic", str),
        field_value(line, "is_switch", bool),
        None if history is None else tuple(history),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a made trace.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    write_jsonl(arguments.path, generate(arguments.seed))


if __name__ == "__main__":
    main()
