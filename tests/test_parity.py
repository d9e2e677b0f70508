"""P10: every backend gives the same bits, for any value, cut and number of threads."""

import itertools
from dataclasses import replace

import pytest
import torch

from halfstep.backends import cpu, eager, layout, traced
from halfstep.contracts import Counter, Format, Job, Plan
from halfstep.formats import GRADS, MOMENTS, WEIGHTS
from halfstep.primitives import VOCABULARY
from halfstep.rules.adam import ADAM
from harness import (
    CPU,
    GROUP,
    HERE,
    MOMENT_FORMATS,
    PLANS,
    WEIGHT_FORMATS,
    assert_jobs_same,
    assert_same,
    copy,
    job,
    load,
    run,
    specials,
    spread,
    store,
)

OTHERS = [name for name in HERE if name != "eager"]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("wild", [False, True], ids=["ordinary", "wild"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_p10_a_step_has_the_same_bits(plan: Plan, wild: bool, other: str) -> None:
    # sizes that no vector width divides; different step counts in one call
    jobs = [
        job(plan, shape, seed, step, wild=wild)
        for seed, (shape, step) in enumerate([((5003,), 1), ((3, 7), 900), ((), 5), ((5, 3, 100), 2**24 + 1)])
    ]
    want, got = [copy(j) for j in jobs], [copy(j) for j in jobs]
    counts = run(plan, want, "eager"), run(plan, got, other)
    assert_jobs_same(want, got)
    assert counts[0] == counts[1]
    first, before = (one.state[-1] if plan.rule.observes else one.param for one in (want[0], jobs[0]))
    assert not torch.equal(first, before), "nothing was stepped"


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(
    "format",
    [*WEIGHT_FORMATS.values(), *MOMENT_FORMATS.values()],
    ids=[*WEIGHT_FORMATS, *(f"moment-{name}" for name in MOMENT_FORMATS)],
)
def test_p10_a_format_has_the_same_bits(format: Format, other: str) -> None:
    values = torch.cat([specials(), spread(200_100 - len(specials()))]).view(-1, 300)
    want = store(format, values, "eager")
    for a, b in zip(want, store(format, values, other), strict=True):
        assert_same(a, b)
    # any bits in the parts, as a param written from outside beside a stale remainder has them
    parts = [spread(p.numel()).view(torch.uint8)[: p.nbytes].clone().view(p.dtype).view(p.shape) for p in want]
    assert_same(load(format, parts, "eager"), load(format, parts, other))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_p10_cut_anywhere_the_bits_stay(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    # rows shorter than a block, and rows whose last block is short
    wholes = [job(plan, shape, 5, 7, wild=True) for shape in [(997, 3), (41, 2, 150)]]
    wants = [copy(whole) for whole in wholes]
    run(plan, wants, "eager")

    def assert_cut_same(backend: str) -> None:
        for whole, want in zip(wholes, wants, strict=True):
            got, n = copy(whole), len(whole.param)
            parts = [
                Job(
                    got.param[a:b],
                    got.grad[a:b],
                    tuple(s[a:b] for s in got.state),
                    got.scalars,
                    replace(got.counter, start=a * got.param[0].numel()),
                )
                for a, b in itertools.pairwise([0, 1, n // 3, n // 3, n])
            ]
            run(plan, parts, backend)
            assert_jobs_same([want], [got])

    for backend in HERE:
        assert_cut_same(backend)
    monkeypatch.setattr(eager, "PIECE", 140)
    monkeypatch.setattr(cpu, "SPAN", 10)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            for backend in HERE:
                assert_cut_same(backend)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("weights", ["split16", "split8"])
def test_p10_a_block8_state_cut_at_any_row_is_the_uncut_one(weights: str, half: torch.dtype, backend: str) -> None:
    kinds = tuple(MOMENTS["block8"].of(moment) for moment in ADAM.moments)
    plan = Plan(ADAM, WEIGHTS[weights][half], kinds, GRADS[half], CPU)
    whole = job(plan, (19, 3, 100), 2, 1)  # rows of two full blocks and a short one
    cuts = [copy(whole) for _ in range(20)]
    for step in range(1, 4):
        grad = job(plan, (19, 3, 100), step, 1).grad
        now = {"grad": grad, "scalars": (1.0, *ADAM.scalars(GROUP, step))}
        whole = replace(whole, **now, counter=Counter(3, 4, step))
        run(plan, [whole], backend)
        for row, cut in enumerate(cuts):
            halves = [
                replace(
                    whole,
                    param=cut.param[place],
                    grad=grad[place],
                    state=tuple(part[place] for part in cut.state),
                    counter=Counter(3, 4, step, (place.start or 0) * 300),
                )
                for place in (slice(None, row), slice(row, None))
            ]
            run(plan, halves, backend)
            assert_jobs_same([cut], [whole])


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_p10_strides_change_nothing(plan: Plan, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "STAGED", 140)
    monkeypatch.setattr(eager, "PIECE", 140)
    for shape in [(6, 5, 7), (3, 40, 7)]:
        want = job(plan, shape, 3, 4)
        got = copy(want)
        strided = replace(
            got,
            param=got.param.permute(2, 0, 1).contiguous().permute(1, 2, 0),
            grad=got.grad.permute(1, 2, 0).contiguous().permute(2, 0, 1),
        )
        assert not strided.param.is_contiguous()
        run(plan, [want], "eager")
        run(plan, [strided], backend)
        assert_jobs_same([want], [strided])


def test_every_backend_binds_every_word() -> None:
    assert set(VOCABULARY) == set(eager.WORDS) == set(traced.WORDS)


def test_an_unbound_word_says_what_to_do() -> None:
    for name, word in VOCABULARY.items():
        arguments = [0] * word.__code__.co_argcount
        with pytest.raises(TypeError, match=rf"{name}\(\) has no meaning of its own: pass .* to a backend's bind\(\)"):
            word(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("format", WEIGHT_FORMATS.values(), ids=WEIGHT_FORMATS)
def test_p10_every_mantissa_has_the_same_bits(format: Format) -> None:
    mantissas = torch.arange(2**23, dtype=torch.int32)
    # exponents around each place where a format changes its ways, and one in the middle of nowhere
    for exponent in (0, 1, 77, 101, 102, 103, 110, 111, 112, 113, 127, 141, 142, 143, 254):
        for sign in (0, -(2**31)):
            values = ((mantissas | (exponent << 23)) | sign).view(torch.float32)
            want = store(format, values, "eager")
            for other in OTHERS:
                for a, b in zip(want, store(format, values, other), strict=True):
                    assert_same(a, b)
                assert_same(load(format, want, "eager"), load(format, want, other))
