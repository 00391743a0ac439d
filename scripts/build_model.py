"""Build one of the local models: ``python scripts/build_model.py tiny-deepseek --out DIR``.

The result appears under its final name only when it is complete, so that an interrupted build
can never be mistaken for a model.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

RECIPES = {"smollm2": "models.smollm2", "tiny-deepseek": "models.tiny_deepseek"}

Say = Callable[[str], None]


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Yield a scratch folder beside ``out`` that takes its place if the block succeeds."""
    partial = out.with_name(f".{out.name}.partial")
    replaced = out.with_name(f".{out.name}.replaced")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in partial.iterdir():
            path.chmod(0o644)  # safetensors writes files that only their owner may read
        if out.exists():
            out.rename(replaced)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def build(name: str, out: Path, say: Say) -> None:
    """Build model ``name`` into the folder ``out``, replacing what was there."""
    recipe = import_module(RECIPES[name])
    with staged(out) as folder:
        recipe.build(folder, say)


def main() -> int:
    """Command line; progress goes to stdout with the elapsed seconds."""
    parser = argparse.ArgumentParser(description="build a model on this machine")
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    arguments = parser.parse_args()
    started = time.monotonic()
    os.environ["TQDM_DISABLE"] = "1"  # libraries' progress bars would only break up our lines

    def say(message: str) -> None:
        print(f"[{time.monotonic() - started:5.1f}s] {message}", flush=True)

    try:
        build(arguments.name, arguments.out, say)
    except KeyboardInterrupt:
        say(f"{arguments.name}: interrupted, nothing kept")
        return 130
    say(f"{arguments.name}: ready in {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
