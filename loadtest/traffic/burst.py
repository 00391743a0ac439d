"""Prompts that leave a model many ways to go on, so that most of its tokens are hard to guess."""

from __future__ import annotations

import itertools
import random

from loadtest.traffic.draw import Draws, Words, shuffled

_LANGUAGES = (
    "Python", "Go", "Rust", "Java", "C", "Haskell", "TypeScript", "Kotlin", "Swift", "Ruby",
    "OCaml", "Scala",
)  # fmt: skip
_TRIOS = tuple(itertools.permutations(_LANGUAGES, 3))

TEMPLATES = (
    "Implement $algorithm in three programming languages ($trio). Compare their time complexity "
    "and $aspect, and sum up in a markdown table.",
    "请用三种不同编程语言（$chinese_trio）实现$chinese_algorithm，并对比时间复杂度和"
    "$chinese_aspect，最后用 markdown 表格总结。",
    "Write a short story of about $words words in which $hero finds $thing $place. $rule",
    "Brainstorm $n unusual uses for $thing $place, from sensible to absurd. Rank them for $hero "
    "and defend the order.",
    "Write a dialogue $place between $hero and $rival about $subject; both change their minds. "
    "$rule",
    "Invent $n proverbs of a people who live $place and fear $subject. Explain two of them "
    "to $hero.",
    "Describe a board game for $n players about $subject: name, pieces, rules and a first round "
    "with $hero and $rival.",
    "Write a poem on $thing $place, then the review of a critic who is $hero. $rule",
    "请写一篇约$words字的短篇小说：$chinese_hero在$chinese_place捡到了$chinese_thing。"
    "每一段换一种情绪，结尾出人意料。",
    "请为$chinese_place设计$n个从未有过的节日，说明来历、食物和禁忌，其中一个"
    "与$chinese_thing有关，由$chinese_hero主持，共约$words字。",
)

_WORDS: Words = {
    "n": tuple(map(str, range(3, 25))),
    "words": tuple(map(str, range(150, 900))),
    "trio": tuple(f"{first}, {second} and {third}" for first, second, third in _TRIOS),
    "chinese_trio": tuple(map("、".join, _TRIOS)),
    "algorithm": (
        "quicksort", "merge sort", "heapsort", "radix sort", "a binary search tree", "a trie",
        "Dijkstra's algorithm", "an LRU cache", "a Bloom filter", "the sieve of Eratosthenes",
        "Knuth-Morris-Pratt search", "a skip list", "topological sorting", "union-find",
    ),
    "aspect": (
        "memory use", "stability", "readability", "worst inputs", "idioms", "testability",
        "parallel variants", "error handling",
    ),
    "chinese_algorithm": (
        "快速排序", "归并排序", "堆排序", "基数排序", "二叉搜索树", "前缀树", "最短路径算法",
        "布隆过滤器", "素数筛法", "字符串匹配", "跳表", "拓扑排序", "并查集",
    ),
    "chinese_aspect": ("内存占用", "稳定性", "可读性", "最坏情况", "并行方案", "错误处理"),
    "hero": (
        "a retired astronaut", "a nervous lighthouse keeper", "a baker who cannot sleep",
        "a twelve-year-old inventor", "an unemployed ghost", "a librarian with a secret",
        "the last beekeeper", "a train driver in love", "a tax inspector", "a homesick robot",
        "a blind cartographer", "an honest thief",
    ),
    "rival": (
        "a talking crow", "the mayor", "an old rival", "a travelling mathematician", "the moon",
        "a child who asks why", "a chess computer", "a stranger in a red coat", "the night nurse",
    ),
    "thing": (
        "a clock that runs backwards", "an unopened letter", "a broken violin", "a paper boat",
        "seven identical keys", "a map of nowhere", "a jar of fog", "a rusty umbrella",
        "a mirror without reflection", "a stone that hums", "a half-finished bridge",
        "a box of teeth",
    ),
    "place": (
        "on the sea floor", "in an empty airport", "in a market at dawn", "above the clouds",
        "in a city without doors", "on a frozen river", "inside a library", "on a night train",
        "in a greenhouse in winter", "at the edge of a desert", "in an abandoned cinema",
    ),
    "subject": (
        "silence", "inheritance", "the colour blue", "bad luck", "migration", "forgiveness",
        "machines that dream", "the end of winter", "borrowed time", "fair prices", "echoes",
        "growing old",
    ),
    "rule": (
        "No sentence may have more than nine words.", "Every paragraph changes its mood.",
        "Tell it backwards.", "Avoid the letter z and every cliché.", "End with a question.",
        "Mix three registers.", "Use a different metaphor in every line.",
        "Let the weather contradict the plot.",
    ),
    "chinese_hero": (
        "一位退休的宇航员", "失眠的面包师", "十二岁的发明家", "最后一位养蜂人", "想家的机器人",
        "诚实的小偷", "灯塔看守人", "图书馆管理员",
    ),
    "chinese_place": (
        "海底", "空无一人的机场", "清晨的集市", "没有门的城市", "结冰的河上", "夜行列车",
        "沙漠边缘", "废弃的电影院",
    ),
    "chinese_thing": (
        "一只倒着走的钟", "一封没拆开的信", "一把断弦的小提琴", "七把一样的钥匙", "一罐雾",
        "一块会唱歌的石头", "没有倒影的镜子", "一把生锈的雨伞",
    ),
}  # fmt: skip


def burst_prompts(seed: int, many: int) -> list[str]:
    """``many`` different prompts, the templates taking turns."""
    source = random.Random(f"{seed}/burst")
    prompts: dict[str, None] = {}
    for template in itertools.cycle(shuffled(source, TEMPLATES)):
        if len(prompts) == many:
            break
        prompts[Draws(source, _WORDS).fill(template)] = None
    return list(prompts)
