"""Running moments against numbers in full precision, and the search against plain arithmetic."""

import pytest
import torch
from deepseek_flash.dflash import neighbours
from deepseek_flash.dflash.entry import Entry
from deepseek_flash.dflash.neighbours import RunningMoments, nearest
from deepseek_flash.dflash.table import Table
from hypothesis import given
from hypothesis import strategies as st

CUDA = torch.cuda.is_available()
SIZE = 4


@pytest.fixture(params=["cpu", "cuda"] if CUDA else ["cpu"])
def device(request):
    return torch.device(request.param)


def seen(states, device="cpu"):
    moments = RunningMoments(states.shape[1], torch.device(device))
    for state in states:
        moments.add(state.to(device))
    return moments


def filled(states, device, tenants=None, **options):
    """A table whose row ``rows[i]`` holds ``states[i]``."""
    table = Table(len(states) + 2, device, block=2, hidden_size=states.shape[1], **options)
    rows = []
    for number, state in enumerate(states):
        tenant = tenants[number] if tenants else 7
        table.insert(Entry(number + 1, (0, 0), tenant, (1,), False, 0), state)
        rows.append(table.find(number + 1))
    return table, rows


def random_states(count, size=SIZE, seed=0):
    """As a model's: all alike, but for a little in every dimension."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.linspace(-50.0, 200.0, size)
    return common + torch.randn((count, size), generator=generator) * torch.logspace(-1, 1, size)


@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=2), min_size=1,
                max_size=30))  # fmt: skip
def test_moments_are_the_mean_and_the_population_variance(values):
    states = torch.tensor(values)
    moments = seen(states)
    exact = states.double()
    torch.testing.assert_close(moments.mean.double(), exact.mean(0), rtol=1e-5, atol=1e-3)
    variance = exact.var(0, correction=0)
    torch.testing.assert_close(moments.variance.double(), variance, rtol=1e-4, atol=1e-2)


def test_a_large_mean_does_not_swallow_a_small_deviation():
    states = torch.tensor([[10_000.0 + number % 2] for number in range(1000)])
    moments = seen(states)
    assert moments.mean.item() == pytest.approx(10_000.5, abs=0.01)
    assert moments.variance.item() == pytest.approx(0.25, rel=0.01)


def test_a_long_run_stays_sound_and_forgets(monkeypatch):
    monkeypatch.setattr(neighbours, "HORIZON", 16)
    first, second = random_states(400, seed=1), random_states(400, seed=2) * 3 + 1000
    moments = seen(torch.cat((first, second)))
    moments.count += 2**60  # as after a long run
    for state in second:
        moments.add(state)
    deviation = second.std(0)
    assert ((moments.mean - second.mean(0)).abs() < deviation).all()
    assert ((moments.variance.sqrt() / deviation - 1).abs() < 0.6).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_does_not_stay(bad):
    states = random_states(50)
    moments = seen(states)
    before = moments.mean.clone()
    moments.add(torch.full((SIZE,), bad))
    assert torch.equal(moments.mean, before) and moments.variance.isfinite().all()


def test_standard_states_have_mean_0_and_deviation_1():
    states = random_states(200)
    standard = seen(states).standardise(states)
    assert standard.mean(0).abs().max() < 1e-2
    assert (standard.std(0, correction=0) - 1).abs().max() < 1e-3
    assert torch.equal(seen(states).standardise(states[3]), standard[3])


@pytest.mark.parametrize("other", [1 / 3, 1 / 3 + 2**-25])  # equal, or the next number
def test_a_dimension_that_never_varied_says_nothing(other):
    states = random_states(20)
    states[::2, 1], states[1::2, 1] = 1 / 3, other
    moments = seen(states)
    states[0, 1] = 1000.0
    assert not moments.standardise(states)[:, 1].any()


def test_raw_cosines_say_nothing_and_standard_ones_do(device):
    states = random_states(40, 16)
    likeness = (states[1] - states[0]) * 3
    alike = states.mean(0) + likeness
    states[5], states[17] = alike, alike + 0.3 * (states[3] - states[2])
    raw = torch.cosine_similarity(states, alike[None])
    assert raw.min() > 0.99
    table, rows = filled(states, device)
    found = nearest(table, seen(states, device), alike.to(device), 7, least_similarity=0.9)
    assert [row for row, _ in found] == [rows[5], rows[17]]
    assert found[0][1] == pytest.approx(1.0, abs=1e-6) and found[1][1] < 0.999


@given(st.integers(0, 2**16), st.integers(0, 14), st.floats(-1, 1), st.booleans())
def test_it_finds_what_plain_arithmetic_finds(seed, most, least, excluded):
    states = random_states(12, seed=seed)
    tenants = [number % 2 for number in range(12)]
    table, rows = filled(states, torch.device("cpu"), tenants)
    moments, query = seen(states), random_states(1, seed=seed + 1)[0]
    exclude = rows[2] if excluded else None
    exact, mean = states.double(), states.double().mean(0)
    standard = (exact - mean) / exact.std(0, correction=0)
    wanted = (query.double() - mean) / exact.std(0, correction=0)
    cosines = torch.cosine_similarity(standard, wanted[None]).tolist()
    expected = sorted(
        ((cosine, row) for cosine, row, tenant in zip(cosines, rows, tenants)
         if tenant == 0 and row != exclude and cosine >= least), reverse=True,
    )[:most]  # fmt: skip
    found = nearest(table, moments, query, 0, most=most, least_similarity=least, exclude=exclude)
    assert [row for row, _ in found] == [row for _, row in expected]
    assert [c for _, c in found] == pytest.approx([c for c, _ in expected], abs=1e-3)


def test_free_rows_and_rows_without_a_state_are_no_neighbours(device):
    states = random_states(6)
    states[2] = 0.0
    table, rows = filled(states, device)
    table.remove(rows[4])
    table.hidden[rows[4]] = states[4].to(device)  # whatever is left there
    moments = seen(states[[0, 1, 3, 5]], device)
    found = nearest(table, moments, states[0].to(device), 7, least_similarity=-1.0)
    assert sorted(row for row, _ in found) == sorted(rows[number] for number in (0, 1, 3, 5))
    # Free rows carry tenant 0: a tenant of that name must not find them.
    assert nearest(table, moments, states[0].to(device), 0, least_similarity=-1.0) == []


def test_no_cosine_is_above_1(device):
    states = random_states(100, 64)
    table, rows = filled(states, device)
    moments = seen(states, device)
    for state, row in zip(states.to(device), rows):
        (best,) = nearest(table, moments, state, 7, most=1)
        assert best[0] == row and 0.9999 < best[1] <= 1.0


def test_equals_come_in_the_order_of_rows(device):
    states = random_states(1).repeat(8, 1)
    table, rows = filled(states, device)
    found = nearest(table, seen(random_states(9), device), states[0].to(device), 7, most=5)
    assert [row for row, _ in found] == sorted(rows)[:5]


@pytest.mark.parametrize("count", [0, 1])
def test_without_a_deviation_there_are_no_neighbours(device, count):
    states = random_states(3)
    table, _ = filled(states, device)
    assert nearest(table, seen(states[:count], device), states[0].to(device), 7) == []


def test_a_state_that_deviates_in_nothing_has_no_neighbours(device):
    states = random_states(3)
    table, _ = filled(states, device)
    moments = seen(states, device)
    for query in (moments.mean, torch.full((SIZE,), torch.nan, device=device)):
        assert nearest(table, moments, query, 7, least_similarity=-1.0) == []


def test_narrow_states_and_tables_of_none(device):
    states = random_states(6)
    table, rows = filled(states, device, hidden_dtype=torch.bfloat16)
    moments = seen(states, device)
    assert nearest(table, moments, table.hidden[rows[3]], 7, most=1)[0][0] == rows[3]
    empty = Table(4, device, block=2, hidden_size=SIZE)
    assert nearest(empty, moments, states[0].to(device), 7) == []


def test_the_search_changes_nothing(device):
    states = random_states(5)
    table, _ = filled(states, device)
    moments, query = seen(states, device), states[0].to(device)
    before = [tensor.clone() for tensor in (*table.tensors, moments.mean, moments.variance, query)]
    nearest(table, moments, query, 7, exclude=1)
    after = (*table.tensors, moments.mean, moments.variance, query)
    assert all(torch.equal(one, other) for one, other in zip(before, after))
    assert moments.count == 5
