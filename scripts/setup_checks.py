"""What set-up refuses, and how it says so.

A check returns the one line to refuse with, or None; it looks at nothing but its arguments. Old
Pythons must be able to read this file, or they could not be refused.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

OLDEST, NEWEST = (3, 11), (3, 13)
LOCAL_MODELS = ("smollm2", "tiny-deepseek")


class Refusal(Exception):
    """Set-up cannot go on; the text says in one line what to do."""


def check_python(version: Sequence[int]) -> str | None:
    """Refuse an interpreter that Triton's stubs and the pinned packages are not made for."""
    if OLDEST <= tuple(version[:2]) <= NEWEST:
        return None
    found = ".".join(map(str, version[:3]))
    return f"Python {found} will not do: run this with Python 3.11 (tested), 3.12 or 3.13"


def check_platform(system: str, machine: str) -> str | None:
    """Refuse machines for which there is no Triton binary."""
    if (system, machine) == ("Linux", "x86_64"):
        return None
    return f"{system} {machine} will not do: run this on Linux x86-64, where Triton's binary runs"


def check_libpython(shared: bool, library: Path | None) -> str | None:
    """Refuse an interpreter whose library Triton's Python stub could not load."""
    if not shared:
        return (
            "this Python has no shared libpython, which Triton loads: use one built with"
            " --enable-shared (pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install 3.11)"
        )
    if library is None:
        return (
            "the shared libpython of this Python is missing: install it"
            " (Debian, Ubuntu: the package libpython3.11) or use another Python 3.11"
        )
    return None


def check_venv_module(available: bool) -> str | None:
    """Refuse a Python that the distribution stripped of what makes virtual environments."""
    if available:
        return None
    return "this Python cannot make a virtual environment: install the package python3-venv"


def check_disk(free_gb: float, needed_gb: float) -> str | None:
    """Refuse to begin what the disk cannot hold."""
    if free_gb >= needed_gb:
        return None
    return f"{free_gb:.1f} GB free on this disk and {needed_gb:.1f} GB needed: free some space"


def check_numpy(installed: Iterable[str]) -> str | None:
    """Refuse numpy 2, given the entries of site-packages: Triton's stub is built for numpy 1."""
    for entry in installed:
        found = re.match(r"numpy-((\d+)[^-]*)\.dist-info$", entry)
        if found and int(found.group(2)) >= 2:
            fix = ".venv/bin/python -m pip install --no-deps numpy==1.26.4"
            return f"numpy {found.group(1)} makes Triton return empty tensors: run {fix}"
    return None


def check_model(model: str, is_checkpoint: Callable[[str], bool]) -> str | None:
    """Refuse what is neither a model of ours, nor a local checkpoint, nor a Hugging Face id."""
    if not model or model in LOCAL_MODELS or is_checkpoint(model):
        return None
    if re.match(r"[A-Za-z0-9][\w.-]*/[\w.-]+$", model):
        return None
    known = ", ".join(LOCAL_MODELS)
    return f"no model {model!r}: use {known}, a Hugging Face id, or a folder with config.json"


def find_libpython(folders: Iterable[str], name: str) -> Path | None:
    """Return the shared library ``name`` from the first folder that has it."""
    paths = (Path(folder) / name for folder in folders if folder and name)
    return next((path for path in paths if path.is_file()), None)


def libpython() -> Path | None:
    """Return the shared library of the running interpreter."""
    libdir: str = sysconfig.get_config_var("LIBDIR") or ""
    # Debian keeps it one level below LIBDIR.
    multiarch = os.path.join(libdir, sysconfig.get_config_var("MULTIARCH") or "")
    return find_libpython((libdir, multiarch), sysconfig.get_config_var("INSTSONAME") or "")


def is_checkpoint(folder: str) -> bool:
    """Say whether ``folder`` holds a model."""
    return (Path(folder).expanduser() / "config.json").is_file()


def refuse_if(problem: str | None) -> None:
    """Raise the refusal that a check returned, if it did."""
    if problem:
        raise Refusal(problem)
