"""The four kinds of made prompts."""

from loadtest.traffic.kinds.chinese import CHINESE
from loadtest.traffic.kinds.code import CODE
from loadtest.traffic.kinds.email import EMAIL
from loadtest.traffic.kinds.sql import SQL

GENRES = {"code": CODE, "sql": SQL, "chinese": CHINESE, "email": EMAIL}
KINDS = tuple(GENRES)
