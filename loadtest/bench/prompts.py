"""Prompts for parity and overhead: English, Chinese, code, emoji. Fixed, so that runs compare."""

from __future__ import annotations

_ENGLISH = (
    "Explain what a GPU is.", "Write a short email that cancels a meeting.",
    "Why is the sky blue?", "List three uses of a hash table.", "What is a mutex?",
    "Describe the water cycle.", "Give advice on learning to cook.", "Who wrote Hamlet?",
    "Summarise the plot of Cinderella.", "How do vaccines work?",
    "What is the difference between TCP and UDP?", "Tell me about the Roman Empire.",
    "Plan a weekend in Lisbon.",
)  # fmt: skip
_CHINESE = (
    "请介绍一下北京。", "什么是机器学习？", "写一首关于秋天的短诗。", "如何学习编程？",
    "解释一下光合作用。", "推荐三本中文小说。", "为什么天空是蓝色的？", "给老师写一封感谢信。",
    "什么是区块链？", "怎样保持健康？", "介绍一下长城的历史。", "写一个自我介绍。",
    "春节有哪些习俗？",
)  # fmt: skip
_CODE = (
    "def quicksort(items):\n", "SELECT name, COUNT(*) FROM orders\n",
    "#include <stdio.h>\nint main(",
    "class Stack:\n    def __init__(self):\n", "function debounce(fn, ms) {\n",
    "fn main() {\n    let mut total = 0;\n", "import numpy as np\n\ndef softmax(x):\n",
    "for i in range(10):\n    print(", "CREATE TABLE users (\n  id INTEGER PRIMARY KEY,\n",
    "public static int fib(int n) {\n", "#!/bin/bash\nset -euo pipefail\n",
    "<html>\n  <body>\n    <h1>",
)  # fmt: skip
_EMOJI = (
    "😀 😃 😄 continue:", "Repeat exactly: ďábel 👩‍👩‍👧 😊", "🚀 launch plan:",
    "Weather: ☀️🌧️❄️ means",
    "I ❤️ coffee because", "🇨🇳🇫🇷🇩🇪 are flags of", "Emoji story: 🐺🐷🐷🐷", "🎵 lyrics:",
    "Translate: 🍎 + 🥧 =", "👍🏽 skin tone test", "🧠💡 idea:", "Café naïve façade 😅",
)  # fmt: skip

PROMPTS: tuple[str, ...] = (*_ENGLISH, *_CHINESE, *_CODE, *_EMOJI)  # 50
