"""The rules of the code's structure, and Triton's configurations among one another."""

import ast
import re
from pathlib import Path

import pytest

from tests.unit import pbtxt

SOURCES = pbtxt.REPOSITORY / "backend_src"
PACKAGE = SOURCES / "deepseek_flash"
FILES = sorted(PACKAGE.rglob("*.py"))
MODEL_FILES = sorted(pbtxt.MODELS.glob("*/*/model.py"))
TRITON = "triton_python_backend_utils"


def name_of(file):
    parts = file.relative_to(SOURCES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in FILES}


def inside(file):
    return str(file.relative_to(PACKAGE))


class Imports(ast.NodeVisitor):
    """Every module that a file imports, in functions too; what is for types only apart."""

    def __init__(self, file):
        self.at_run_time, self.for_types = set(), set()
        self._found = self.at_run_time
        self.visit(ast.parse(file.read_text(encoding="utf-8")))

    def visit_If(self, node):
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            self._found = self.for_types
            for child in node.body:
                self.visit(child)
            self._found = self.at_run_time
            node.body = []
        self.generic_visit(node)

    def visit_Import(self, node):
        self._found |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node):
        assert node.level == 0, "relative import"
        self._found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}


def roots(names):
    return {name.split(".")[0] for name in names}


def reachable(module):
    """Everything that comes with a module, through the package's own modules."""
    seen, left = set(), [module]
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in MODULES:
            parents = name.split(".")[:-1]
            left += [".".join(parents[:end]) for end in range(1, len(parents) + 1)]
            left += Imports(MODULES[name]).at_run_time
    return seen


@pytest.mark.parametrize(
    "file", [f for f in FILES if inside(f).startswith(("dspark/", "dflash/"))], ids=inside
)
def test_dspark_and_dflash_know_neither_vllm_nor_triton(file):
    found = Imports(file)
    with_types = roots(found.at_run_time | found.for_types | reachable(name_of(file)))
    assert not with_types & {"vllm", TRITON, "tritonclient"}


@pytest.mark.parametrize("file", FILES, ids=inside)
def test_vllm_is_imported_where_it_may_be(file):
    names = {name for name in Imports(file).at_run_time if name.split(".")[0] == "vllm"}
    public_only = (
        "decoder/engine.py", "decoder/session.py",
        # The gateway is vLLM's serving layer over an engine client: these are the glue, and
        # nothing else in it knows vLLM. library.py checks the version before anything is built.
        "gateway/library.py", "gateway/engine.py", "gateway/outputs.py", "gateway/parsers.py",
    )  # fmt: skip
    if inside(file) in public_only:
        assert not any(part.startswith("_") for name in names for part in name.split("."))
    elif not inside(file).startswith("worker/"):
        assert not names


@pytest.mark.parametrize("file", [*FILES, *MODEL_FILES], ids=lambda f: "/".join(f.parts[-3:]))
def test_only_config_knows_the_names_in_the_environment(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = {
        node.value for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and re.fullmatch(r"DEEPSEEK_FLASH_\w*", str(node.value))
    }  # fmt: skip
    assert not names or file == PACKAGE / "config.py"
    reads = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
    ]  # fmt: skip
    hands_on = {
        "stage.py",
        "serve.py",
        "operate.py",
        "launcher/keeper.py",
        "gateway/server.py",
        "decoder/engine.py",
    }  # the last one sets vLLM's own
    assert not reads or file in MODEL_FILES or inside(file) in hands_on


@pytest.mark.parametrize("file", MODEL_FILES, ids=lambda f: f.parts[-3])
def test_model_py_is_short_and_leaves_the_work_to_the_package(file):
    assert len(file.read_text(encoding="utf-8").splitlines()) < 120
    assert roots(Imports(file).at_run_time) <= {"os", "deepseek_flash", TRITON}


def test_there_are_three_models_in_python():
    assert {file.parts[-3] for file in MODEL_FILES} == {
        "dspark_scheduler", "dflash_cache", "deepseek_decoder",
    }  # fmt: skip


@pytest.mark.parametrize("file", FILES, ids=inside)
def test_no_method_is_defined_twice(file):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            methods = [
                child.name for child in node.body
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                and not child.decorator_list
            ]  # fmt: skip
            assert len(set(methods)) == len(methods)


# -- Triton's configurations -----------------------------------------------------------------

ENSEMBLE, SCHEDULER, DECODER = "deepseek_flash", "dspark_scheduler", "deepseek_decoder"


@pytest.mark.parametrize("model", [ENSEMBLE, SCHEDULER, "dflash_cache", DECODER])
def test_every_input_is_optional(model):
    # Where one is missing, Triton would neither answer nor fail.
    assert all(optional for _, _, optional in pbtxt.tensors(model, "input").values())


def test_the_ensembles_inputs_are_the_schedulers():
    assert pbtxt.tensors(ENSEMBLE, "input") == pbtxt.tensors(SCHEDULER, "input")


def test_the_ensembles_outputs_are_the_decoders():
    assert pbtxt.tensors(ENSEMBLE, "output") == pbtxt.tensors(DECODER, "output")


def test_every_input_and_output_of_the_ensemble_is_mapped():
    steps = pbtxt.steps(ENSEMBLE)
    assert steps[SCHEDULER]["input"] == [(n, n) for n in pbtxt.tensors(ENSEMBLE, "input")]
    assert steps[DECODER]["output"] == [(n, n) for n in pbtxt.tensors(ENSEMBLE, "output")]


def test_plan_and_lookup_go_from_stage_to_stage():
    steps = pbtxt.steps(ENSEMBLE)
    plan, lookup = ("plan", "plan"), ("lookup", "lookup")
    assert list(steps) == [SCHEDULER, "dflash_cache", DECODER]
    assert steps[SCHEDULER]["output"] == [plan]
    assert steps["dflash_cache"] == {"input": [plan], "output": [lookup]}
    assert steps[DECODER]["input"] == [plan, lookup]


def test_only_the_decoder_is_decoupled():
    models = [directory.name for directory in pbtxt.MODELS.iterdir()]
    assert [name for name in models if "decoupled: true" in pbtxt.text_of(name)] == [DECODER]


def test_the_directories_names_are_the_models():
    for directory in pbtxt.MODELS.iterdir():
        assert f'name: "{directory.name}"' in pbtxt.text_of(directory.name)
        assert Path(directory / "1").is_dir()
