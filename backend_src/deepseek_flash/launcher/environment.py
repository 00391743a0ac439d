"""Where Triton is on this machine, and the environment that its stubs need."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
MODELS = REPOSITORY / "build" / "models"
BUILT_MODELS = ("smollm2", "tiny-deepseek")


class LaunchError(RuntimeError):
    """Why the server cannot be started: one line that says what to do."""


@dataclass(frozen=True)
class Triton:
    """A Triton installation."""

    binary: Path
    backends: Path | None  # None: where the binary looks by itself


def find_triton() -> Triton:
    """The server of the ``nvidia-pytriton`` wheel in this environment, else one in PATH.

    Raises:
        LaunchError: there is none.
    """
    wheel = Path(sysconfig.get_path("purelib")) / "pytriton" / "tritonserver"
    if (wheel / "bin" / "tritonserver").is_file():
        if not (wheel / "backends" / "python" / "triton_python_backend_stub").is_file():
            raise LaunchError("Triton's Python stub is not in place; run: make setup")
        return Triton(wheel / "bin" / "tritonserver", wheel / "backends")
    found = shutil.which("tritonserver")
    if found is None:
        raise LaunchError("tritonserver not found; run: make setup (or use NVIDIA's container)")
    return Triton(Path(found), None)


def stub_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with what a stub needs to find this interpreter, its library and packages."""
    result = dict(environ)
    # The stub runs isolated: it finds packages through the first python in PATH, not PYTHONPATH.
    binaries = str(Path(sys.prefix) / "bin")
    result["PATH"] = os.pathsep.join([binaries, environ.get("PATH", os.defpath)])
    library = sysconfig.get_config_var("LIBDIR")
    if library and sysconfig.get_config_var("Py_ENABLE_SHARED"):
        # The shared library must be this very interpreter's; Debian keeps it one level deeper.
        deeper = os.path.join(library, sysconfig.get_config_var("MULTIARCH") or "")
        paths = dict.fromkeys((library, deeper, environ.get("LD_LIBRARY_PATH", "")))
        result["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in paths if path)
    result.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; ignored on a GPU
    result.setdefault("TOKENIZERS_PARALLELISM", "false")
    return result


def resolve_model(name: str) -> str:
    """A model's name as ``make serve MODEL=…`` takes it: built here, a path, or a Hub id."""
    if name in BUILT_MODELS:
        path = MODELS / name
        if not (path / "config.json").is_file():
            raise LaunchError(f"the model {name} is not built; run: make setup MODEL={name}")
        return str(path)
    if Path(name).is_dir():
        return str(Path(name).resolve())
    if name.startswith((".", "/", "~")):
        raise LaunchError(f"MODEL={name}: no such directory")
    return name
