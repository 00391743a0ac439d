"""Prompts of five kinds, from traffic that repeats itself to traffic that does not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

_TABLES = ("orders", "customers", "invoices", "employees", "products", "shipments", "payments",
           "tickets")  # fmt: skip
_COLUMNS = ("amount", "created_at", "country", "status", "name")
_PYTHON = (
    "reverses a string", "checks whether a number is prime", "computes the factorial of n",
    "returns the n-th Fibonacci number", "counts the words in a text",
    "removes duplicates from a list", "finds the largest number in a list",
    "checks whether a word is a palindrome",
    "sorts a list of dictionaries by a key", "merges two sorted lists", "flattens a nested list",
    "reads a CSV file", "computes the mean of a list", "finds the median of a list",
    "converts Celsius to Fahrenheit", "computes the greatest common divisor",
    "counts the vowels in a string", "rotates a list by k places", "transposes a matrix",
    "multiplies two matrices", "validates an email address", "generates a random password",
    "counts the frequency of each character", "performs a binary search", "implements bubble sort",
    "implements quicksort", "computes the sum of the digits", "converts a number to binary",
    "checks whether two words are anagrams", "finds the second largest number",
    "splits a list into chunks of n", "counts the lines of a file", "parses a date",
    "computes the power of a number", "removes punctuation from a text",
    "finds common elements of two lists", "capitalises each word", "computes the area of a circle",
    "checks whether a year is a leap year", "converts a list to a dictionary",
)  # fmt: skip
_PEOPLE = ("my manager", "a customer", "my landlord", "Professor Lee", "the support team")
_OCCASIONS = (
    "to move our meeting to Friday", "to say thank you for the help", "to ask for a refund",
    "to decline an invitation", "to report that I am ill", "to ask for an update on the project",
    "to apologise for being late", "to announce that I will be on leave next week",
)  # fmt: skip
_TASKS = (
    "adds two numbers", "reverses a string", "computes the factorial of n",
    "finds the maximum of an array", "checks whether a number is even",
    "counts the words in a text", "sorts an array", "computes the Fibonacci sequence",
    "checks whether a number is prime", "removes duplicates from an array", "sums an array",
    "checks for a palindrome", "converts Celsius to Fahrenheit",
    "finds the index of an item in an array",
)  # fmt: skip
_QUESTIONS = (
    "Why is the sky blue?", "Who painted the Mona Lisa?", "How do vaccines work?",
    "What is inflation?", "How do I bake bread?", "Tell me a story about a dragon.",
    "What causes earthquakes?", "How can I sleep better?", "What is photosynthesis?",
    "Describe the Roman Empire.", "How does a car engine work?", "What is the capital of Peru?",
    "Give me tips for a job interview.", "What are black holes?", "How do bees make honey?",
    "Explain the rules of chess.", "What is a mortgage?", "Who was Marie Curie?",
    "How do I train for a marathon?", "What is machine learning?", "Why do cats purr?",
    "Describe a sunset at the sea.", "What is the difference between weather and climate?",
    "How do airplanes fly?", "What did Shakespeare write?", "How do I remove a coffee stain?",
    "What is democracy?", "Explain gravity to a child.", "How is glass made?",
    "What should I visit in Lisbon?", "Why do leaves change colour?", "What is jazz?",
    "How do I start a garden?", "What is the stock market?", "How does the heart work?",
    "Write a poem about winter.", "What are the benefits of meditation?", "How old is the Earth?",
    "What is a good breakfast?", "How do computers store numbers?",
)  # fmt: skip

KINDS: dict[str, tuple[str, ...]] = {
    "sql": tuple(
        f"Write a SQL query that selects all {table} of the last month, grouped by {column}."
        for column, table in product(_COLUMNS, _TABLES)
    ),
    "python": tuple(f"Write a Python function that {task}." for task in _PYTHON),
    "mail": tuple(
        f"Write a short email to {person} {occasion}."
        for occasion, person in product(_OCCASIONS, _PEOPLE)
    ),
    "languages": tuple(
        f"Write a function in {language} that {task}."
        for task, language in product(_TASKS, ("Python", "JavaScript", "Java"))
    )[:40],
    "unrelated": _QUESTIONS,
}


_TOPICS = (
    "electricity", "the water cycle", "compound interest", "natural selection", "a black box",
    "supply and demand", "the immune system", "recursion", "plate tectonics", "encryption",
    "a healthy diet", "the French Revolution", "renewable energy", "probability", "DNS",
    "the solar system", "teamwork", "a neural network", "the stock exchange", "jet lag",
    "fermentation", "a database index", "the Renaissance", "insulation", "version control",
)  # fmt: skip
_SENTENCES = (
    "The meeting have been moved too Monday becuase the room is not avaliable.",
    "She dont like the new desing, but he think it is alot better then the old one.",
    "Their going to recieve the package tomorow if the whether is good.",
    "The datas was analysed by the team and the result are shown in the tabel below.",
    "I has a question about the invoice wich you send me last week.",
    "We was very happy with you're service and will definately come back.",
    "The server restarts every nihgt, so the users looses there sessions.",
    "Its important to checks the oil level befor you drive the car.",
)  # fmt: skip
_OBJECTS = (
    '{"id": 7, "name": "Ada", "email": "ada@example.com", "active": true}',
    '{"host": "db1", "port": 5432, "user": "app", "retries": 3}',
    '{"title": "Dune", "author": "Frank Herbert", "year": 1965, "pages": 412}',
    '{"order": 1001, "items": [{"sku": "A1", "count": 2}, {"sku": "B4", "count": 1}]}',
    '{"city": "Oslo", "temperature": 4, "wind": "north", "humidity": 81}',
)  # fmt: skip
_PRODUCTS = ("desk lamp", "backpack", "coffee machine", "running shoe", "garden chair", "headset",
             "water bottle", "bicycle helmet", "notebook", "toaster")  # fmt: skip

# What the policy is trained on beside half of each kind; nothing is measured with these.
TRAINING: dict[str, tuple[str, ...]] = {
    "explain": tuple(f"Explain {topic} in simple terms." for topic in _TOPICS),
    "table": tuple(
        f"Write a CREATE TABLE statement for {table} with ten columns." for table in _TABLES
    ),
    "update": tuple(
        f"Write a SQL query that updates the {column} of one of the {table}."
        for table, column in product(_TABLES, _COLUMNS[:3])
    ),
    "script": tuple(
        f"Write a {language} that {task}."
        for task, language in product(_PYTHON[8:20], ("Rust function", "Go function", "C program"))
    ),
    "correct": tuple(
        f"{order}: {text}"
        for text, order in product(_SENTENCES, ("Correct the mistakes in this text",
                                                "Repeat this text word by word, then correct it"))
    ),
    "convert": tuple(
        f"{order}: {text}"
        for text, order in product(_OBJECTS, ("Convert this JSON to YAML", "Explain this JSON",
                                              "Add a field to this JSON",
                                              "Write a Python class for this JSON"))
    ),
    "list": tuple(f"List ten facts about {topic}." for topic in _TOPICS[:20]),
    "product": tuple(f"Write a product description for a {thing}." for thing in _PRODUCTS),
    "note": tuple(
        f"Write a letter to {person} {occasion}."
        for occasion, person in product(
            ("to confirm an appointment", "to complain about the noise", "to invite them to lunch",
             "to cancel a subscription"), _PEOPLE
        )
    ),
}  # fmt: skip


def training() -> list[tuple[str, str]]:
    """Kind and text of all of ``TRAINING``, kind by kind."""
    return [(kind, text) for kind, texts in TRAINING.items() for text in texts]


def prompts(many: int) -> list[tuple[str, str]]:
    """Kind and text of the first ``many`` of each kind, the kinds taking turns."""
    columns: Sequence[tuple[str, ...]] = tuple(texts[:many] for texts in KINDS.values())
    return [pair for row in zip(*columns) for pair in zip(KINDS, row)]
