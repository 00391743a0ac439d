"""Set up everything that serving and testing need: ``python3 scripts/setup.py --model smollm2``.

Standard library only, as it runs before anything is installed. Every step leaves a stamp, written
when the step is complete, which holds a fingerprint of all that went into it. So a second run does
nothing, an interrupted one goes on where it stopped, and a changed pin repeats only its step.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from setup_checks import (
    LOCAL_MODELS,
    Refusal,
    check_disk,
    check_libpython,
    check_model,
    check_numpy,
    check_platform,
    check_python,
    check_venv_module,
    is_checkpoint,
    libpython,
    refuse_if,
)

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BUILD = ROOT / "build"
MODELS = BUILD / "models"
STAMPS = VENV / ".setup"
LOG = BUILD / "setup.log"

VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
STEP_VERSION = "1"
"""Raise it when a step does something else than before with the same inputs."""
TORCH = "torch==2.13.0"
FIRST_TIME_GB, MODEL_GB = 8.0, 1.5
HEARTBEAT_S = 10.0


def fingerprint(*inputs: str) -> str:
    """Return a short digest of everything a step depends on."""
    return hashlib.sha256("\0".join((STEP_VERSION, *inputs)).encode()).hexdigest()[:32]


class Stamp:
    """Says that a step is complete, for these very inputs."""

    def __init__(self, path: Path, value: str) -> None:
        self.path = path
        self.value = value

    def valid(self) -> bool:
        """Say whether the step can be skipped."""
        try:
            return self.path.read_text() == self.value
        except OSError:
            return False

    def write(self) -> None:
        """Mark the step complete; the file appears whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(self.value)
        partial.replace(self.path)


class Setup:
    """The steps in order. Nothing is run, printed or written for a step that is complete."""

    def __init__(self, model: str, dev: bool, peers: bool) -> None:
        self.model = model
        self.site = VENV / "lib" / f"python{VERSION}" / "site-packages"
        self.python = str(VENV / "bin" / "python")
        wanted = {"dev": dev, "clients": dev, "peers": peers}
        extra = [name for name, is_wanted in wanted.items() if is_wanted]
        self.lists = [ROOT / "requirements" / f"{name}.txt" for name in ("cpu", *extra)]
        self.lock = -1
        # Each step builds on the one before, so its fingerprint goes into the next.
        base = fingerprint(sys.version, sysconfig.get_config_var("LIBDIR") or "", str(ROOT))
        self.venv = Stamp(STAMPS / "venv", base)
        self.torch = Stamp(STAMPS / "torch", fingerprint(base, TORCH))
        # One stamp a list: set-up without --dev must not undo what one with it has noted.
        self.packages = [
            Stamp(STAMPS / f"packages-{path.stem}", fingerprint(self.torch.value, path.read_text()))
            for path in self.lists
        ]
        self.triton = Stamp(STAMPS / "triton", fingerprint(self.packages[0].value))
        recipes = [ROOT / "scripts" / "build_model.py", *(ROOT / "scripts" / "models").glob("*.py")]
        recipe = fingerprint(*(path.read_text() for path in sorted(recipes)))
        self.weights = Stamp(MODELS / model / ".stamp", recipe) if model in LOCAL_MODELS else None

    def run(self) -> None:
        """Check the machine, then complete what is incomplete."""
        self.check_machine()
        if all(stamp.valid() for stamp in self.stamps()):
            return
        with self.alone():
            say(1, "machine: fine")
            if not self.venv.valid():
                self.make_venv()
            if not self.torch.valid():
                self.install("torch", 3, self.torch, TORCH, "-c", str(self.lists[0]))
            for path, stamp in zip(self.lists, self.packages, strict=True):
                if not stamp.valid():
                    self.triton.path.unlink(missing_ok=True)  # pip drops its run bits
                    self.install(path.name, 4, stamp, "--no-deps", "-r", str(path))
            refuse_if(check_numpy(os.listdir(self.site)))
            if not self.triton.valid():
                self.make_triton()
            if self.weights and not self.weights.valid():
                self.build_model(self.weights)

    def stamps(self) -> Iterator[Stamp]:
        """Yield the stamps of all steps."""
        yield from (self.venv, self.torch, *self.packages, self.triton)
        if self.weights:
            yield self.weights

    def check_machine(self) -> None:
        """Refuse what cannot work; cheap enough for every start."""
        refuse_if(check_platform(platform.system(), platform.machine()))
        shared = bool(sysconfig.get_config_var("Py_ENABLE_SHARED"))
        refuse_if(check_libpython(shared, libpython()))
        refuse_if(check_venv_module(find_spec("ensurepip") is not None))
        refuse_if(check_model(self.model, is_checkpoint))
        if self.site.is_dir() and self.packages[0].valid():
            refuse_if(check_numpy(os.listdir(self.site)))
        needed = 0.0 if not self.weights or self.weights.valid() else MODEL_GB
        if not self.packages[0].valid():
            needed = FIRST_TIME_GB
        refuse_if(check_disk(shutil.disk_usage(ROOT).free / 1e9, needed))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock that keeps two set-ups from working on the same folder."""
        BUILD.mkdir(exist_ok=True)
        with open(BUILD / ".setup.lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(1, "waiting for another set-up of this folder")
                fcntl.flock(file, fcntl.LOCK_EX)
            self.lock = file.fileno()
            yield

    def make_venv(self) -> None:
        """Make the virtual environment, or take over one that this Python made."""
        if not self.adoptable():
            command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
            self.work(2, "virtual environment .venv", command)
        # Triton's stub runs isolated, without PYTHONPATH: our package must be in site-packages.
        (self.site / "deepseek_flash.pth").write_text(f"{ROOT / 'backend_src'}\n")
        self.venv.write()

    def adoptable(self) -> bool:
        """Say whether ``.venv`` was made by this very Python and has a pip that starts."""
        try:
            made_by = (VENV / "pyvenv.cfg").read_text().splitlines()
            probe = subprocess.run([self.python, "-m", "pip", "--version"], capture_output=True)
        except OSError:
            return False
        home = os.path.dirname(getattr(sys, "_base_executable", sys.executable))
        same = {f"home = {home}", f"version = {platform.python_version()}"} <= set(made_by)
        return same and probe.returncode == 0

    def install(self, title: str, step: int, stamp: Stamp, *what: str) -> None:
        """Let pip install ``what`` into the virtual environment."""
        discard_halves(self.site)
        options = ("--no-input", "--disable-pip-version-check", "--progress-bar", "off")
        self.work(step, title, [self.python, "-m", "pip", "install", *options, *what])
        stamp.write()

    def make_triton(self) -> None:
        """Give Triton's binary and the stub of this Python what pip does not: run bits, a place."""
        server = self.site / "pytriton" / "tritonserver"
        name = "triton_python_backend_stub"
        # As deep in the wheel as its source: the path to the stub's libraries is relative.
        stub = server / "backends" / "python" / name
        partial = stub.with_name(name + ".partial")
        shutil.copyfile(server / "python_backend_stubs" / VERSION / name, partial)
        partial.chmod(0o755)
        partial.replace(stub)
        binary = server / "bin" / "tritonserver"
        binary.chmod(0o755)
        libdir = str((libpython() or stub).parent)
        expect(binary, "--help", "Usage: tritonserver", libdir)
        expect(stub, "", "Expected", libdir)  # it complains about its missing arguments
        say(5, "Triton: server and stub start")
        self.triton.write()

    def build_model(self, stamp: Stamp) -> None:
        """Build one of the local models; it replaces its folder when it is complete."""
        script, out = str(ROOT / "scripts" / "build_model.py"), str(MODELS / self.model)
        self.work(6, self.model, [self.python, script, self.model, "--out", out])
        stamp.write()

    def work(self, step: int, title: str, command: Sequence[str]) -> None:
        """Run ``command`` with a sign of life now and then; show all it said if it fails."""
        say(step, title)
        started = time.monotonic()
        with open(LOG, "w") as log:
            # The lock goes along: should set-up be killed, the next one waits for what still runs.
            child = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, pass_fds=(self.lock,)
            )
        try:
            while not ended(child):
                packages = sum(1 for _ in self.site.glob("*.dist-info"))
                elapsed = time.monotonic() - started
                say(step, f"{title}: {elapsed:.0f} s, {packages} packages in place")
        except BaseException:
            stop(child)
            raise
        if child.returncode:
            print(LOG.read_text(errors="replace"), file=sys.stderr)
            raise Refusal(f"{title} failed; its output is above and in {LOG.relative_to(ROOT)}")
        say(step, f"{title}: done in {time.monotonic() - started:.0f} s")


def say(step: int, message: str) -> None:
    """Print one line of progress."""
    print(f"[setup {step}/6] {message}", flush=True)


def ended(child: subprocess.Popen[bytes]) -> bool:
    """Wait a little for ``child`` to end, and say whether it has."""
    try:
        child.wait(HEARTBEAT_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def stop(child: subprocess.Popen[bytes]) -> None:
    """End ``child`` the way that lets pip remove its temporary files, or else by force."""
    child.send_signal(signal.SIGINT)
    if not ended(child):
        child.kill()


def discard_halves(site: Path) -> None:
    """Remove the records of packages whose installation was cut short, so that pip repeats it.

    pip writes a package's files first and INSTALLER after them; until then METADATA alone would
    make it believe the package is there. ``~name`` is what it moves away during a replacement.
    """
    for folder in site.glob("*.dist-info"):
        if not (folder / "INSTALLER").exists():
            shutil.rmtree(folder)
    for folder in site.glob("~*"):
        shutil.rmtree(folder, ignore_errors=True)


def expect(binary: Path, argument: str, text: str, libdir: str) -> None:
    """Run ``binary`` and refuse if it does not say ``text``: then a library of it is missing."""
    command = [str(binary), argument] if argument else [str(binary)]
    environment = {**os.environ, "LD_LIBRARY_PATH": libdir}
    output = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
    ).stdout.decode(errors="replace")
    if text not in output:
        raise Refusal(f"{binary.name} does not start: {output.strip()[:300] or 'no output'}")


def main() -> int:
    """Command line; returns the exit status."""
    try:
        refuse_if(check_python(sys.version_info[:3]))
        parser = argparse.ArgumentParser(description="install and build what serving needs")
        parser.add_argument("--model", default="", help="smollm2 and tiny-deepseek are built here")
        parser.add_argument("--dev", action="store_true", help="what tests and checks need, too")
        parser.add_argument("--peers", action="store_true", help="also build the benchmarks' peers")
        arguments = parser.parse_args()
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        Setup(arguments.model, arguments.dev, arguments.peers).run()
    except Refusal as problem:
        print(f"setup: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; run it again to go on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
