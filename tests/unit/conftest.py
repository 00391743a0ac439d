"""The same examples in every run, and none kept: a red test is red for everybody."""

import pytest
from hypothesis import settings

settings.register_profile("unit", derandomize=True, deadline=None, database=None)
settings.load_profile("unit")


@pytest.fixture(scope="module")
def module_door():
    """A gateway over an ensemble of this process; the import takes seconds, so only where used."""
    from tests.unit.gateway import serving

    with serving() as door:
        yield door


@pytest.fixture
def door(module_door):
    """The same with an empty cache and a model that says "ok"."""
    module_door.ensemble.reset()
    module_door.engine.plans.clear()
    module_door.engine.pause = 0.0
    module_door.engine.may_begin = lambda: True
    module_door.says("ok")
    return module_door
