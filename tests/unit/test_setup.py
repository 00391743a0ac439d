"""What set-up refuses, and that its stamps and staged folders never vouch for something half."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a script by its path, with its neighbours within reach, as when it is run."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", SCRIPTS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The checks."""
    return load("setup_checks", monkeypatch)


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The set-up script."""
    return load("setup", monkeypatch)


def is_one_line_naming(text: str | None, *words: str) -> bool:
    """Say whether a refusal is one line that contains ``words``."""
    return text is not None and "\n" not in text and all(word in text for word in words)


@pytest.mark.parametrize("version", [(3, 11, 0), (3, 11, 7), (3, 12, 1), (3, 13, 9)])
def test_supported_python(checks: ModuleType, version: tuple[int, ...]) -> None:
    assert checks.check_python(version) is None


@pytest.mark.parametrize("version", [(2, 7, 18), (3, 8, 0), (3, 10, 14), (3, 14, 0), (4, 0, 0)])
def test_other_python_is_refused(checks: ModuleType, version: tuple[int, ...]) -> None:
    found = ".".join(map(str, version))
    assert is_one_line_naming(checks.check_python(version), found, "3.11", "3.13")


@pytest.mark.parametrize("name", ["setup.py", "setup_checks.py"])
def test_an_old_python_can_read_the_refusal(name: str) -> None:
    ast.parse((SCRIPTS / name).read_text(encoding="utf-8"), feature_version=(3, 8))


def test_platform(checks: ModuleType) -> None:
    assert checks.check_platform("Linux", "x86_64") is None
    for system, machine in (("Darwin", "arm64"), ("Linux", "aarch64"), ("Windows", "AMD64")):
        assert is_one_line_naming(checks.check_platform(system, machine), system, "x86-64")


def test_libpython(checks: ModuleType, tmp_path: Path) -> None:
    name = "libpython3.11.so.1.0"
    (tmp_path / "multiarch").mkdir()
    library = tmp_path / "multiarch" / name
    library.touch()
    found = checks.find_libpython([str(tmp_path), "", str(library.parent)], name)
    assert found == library
    assert checks.find_libpython([str(tmp_path)], name) is None
    assert checks.find_libpython([str(tmp_path)], "") is None
    assert checks.check_libpython(True, found) is None
    assert is_one_line_naming(checks.check_libpython(False, found), "--enable-shared")
    assert is_one_line_naming(checks.check_libpython(True, None), "install")


def test_venv_module(checks: ModuleType) -> None:
    assert checks.check_venv_module(True) is None
    assert is_one_line_naming(checks.check_venv_module(False), "python3-venv")


def test_disk(checks: ModuleType) -> None:
    assert checks.check_disk(8.0, 8.0) is None
    assert checks.check_disk(0.1, 0.0) is None
    assert is_one_line_naming(checks.check_disk(7.94, 8.0), "7.9 GB", "8.0 GB")


@pytest.mark.parametrize("entry", ["numpy-2.0.0.dist-info", "numpy-2.3.1rc1.dist-info"])
def test_numpy_2_is_refused(checks: ModuleType, entry: str) -> None:
    version = entry.split("-")[1].removesuffix(".dist")
    assert is_one_line_naming(checks.check_numpy(["numpy", entry]), version, "pip install")


def test_other_packages_are_not_numpy_2(checks: ModuleType) -> None:
    entries = ["numpy", "numpy.libs", "numpy-1.26.4.dist-info", "numpy_financial-2.0.0.dist-info"]
    assert checks.check_numpy(entries) is None
    assert checks.check_numpy([]) is None


def test_model_names(checks: ModuleType, tmp_path: Path) -> None:
    for name in ("", "smollm2", "tiny-deepseek", "deepseek-ai/DeepSeek-V3", "org/a.b_c-1"):
        assert checks.check_model(name, lambda _: False) is None
    assert checks.check_model("./checkpoint", lambda _: True) is None
    for name in ("smolm2", "./missing", "/missing/folder", "../x", "~/x", "a b/c", "-x/y"):
        assert is_one_line_naming(checks.check_model(name, lambda _: False), name, "config.json")
    assert not checks.is_checkpoint(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert checks.is_checkpoint(str(tmp_path))


def test_a_stamp_is_valid_for_its_own_inputs_only(setup: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "new" / "step"
    stamp = setup.Stamp(path, setup.fingerprint("a", "b"))
    assert not stamp.valid()
    stamp.write()
    assert stamp.valid()
    assert [entry.name for entry in path.parent.iterdir()] == ["step"]
    for other in (("a", "c"), ("ab",), ("a", "b", "")):
        assert not setup.Stamp(path, setup.fingerprint(*other)).valid()


def test_packages_cut_short_are_forgotten(setup: ModuleType, tmp_path: Path) -> None:
    whole, half = tmp_path / "a-1.dist-info", tmp_path / "b-1.dist-info"
    for folder in (whole, half, tmp_path / "~umpy", tmp_path / "b"):
        folder.mkdir()
    (whole / "INSTALLER").touch()
    (half / "METADATA").touch()
    setup.discard_halves(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a-1.dist-info", "b"]


def test_a_failed_build_leaves_the_old_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build_model = load("build_model", monkeypatch)
    out = tmp_path / "models" / "m"
    with build_model.staged(out) as folder:
        (folder / "config.json").write_text("old")
    with pytest.raises(KeyboardInterrupt), build_model.staged(out) as folder:
        (folder / "config.json").write_text("half")
        raise KeyboardInterrupt
    assert (out / "config.json").read_text() == "old"
    with build_model.staged(out) as folder:
        (folder / "config.json").write_text("new")
    assert (out / "config.json").read_text() == "new"
    assert [entry.name for entry in out.parent.iterdir()] == ["m"]
