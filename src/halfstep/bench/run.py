"""A run: parity first, then every shape with all that can be timed on it, interleaved."""

import gc
import platform
from collections.abc import Callable, Iterator
from datetime import date
from importlib.metadata import version

import torch

import halfstep
from halfstep.backends import Unavailable
from halfstep.bench import parity
from halfstep.bench.peers import PEERS
from halfstep.bench.results import Measured, Results, Row
from halfstep.bench.settings import Settings
from halfstep.bench.shapes import Shape, Tensors, one
from halfstep.bench.subjects import (
    MAIN,
    SINGLE,
    halfstep_label,
    halfstep_step,
    halfstep_whole,
    memory,
    pairs,
    torch_step,
    torch_whole,
)
from halfstep.bench.timing import Subject, measure
from halfstep.cli.machine import describe

Tell = Callable[[str], None]
Pair = tuple[str, str, str]


def run(settings: Settings, tell: Tell) -> Results:
    """Measure what ``settings`` ask for, and ``tell`` how it goes.

    Raises:
        halfstep.bench.parity.Red: a backend's bits are wrong; nothing was timed.
    """
    machine = describe(torch.device("cpu"))
    tell(machine)
    absent: dict[str, str] = {}
    able = _able(settings, absent, tell)
    measured = [_measure(shape, settings, able, absent, tell) for shape in settings.shapes()]
    return Results(machine, date.today().isoformat(), _versions(), measured, absent)


def _able(settings: Settings, absent: dict[str, str], tell: Tell) -> list[Pair]:
    """Return the pairs of formats that run here, each with its bits checked."""
    asked = [(w, m, d) for d in settings.dtype for w, m in pairs(d) if settings.wants(w, m)]
    able = []
    for weights, moments, dtype in asked:
        try:
            parity.check(weights, moments, dtype)
            able.append((weights, moments, dtype))
        except Unavailable as error:
            absent[f"{halfstep_label(weights, moments)}, {dtype}"] = str(error)
    tell(f"parity: {len(able)} pairs of formats give eager's bits")
    return able


def _measure(shape: Shape, settings: Settings, able: list[Pair], absent: dict[str, str], tell: Tell) -> Measured:
    tell(f"{shape.title}: {settings.rounds} rounds")
    tensors = Tensors(shape.sizes)
    subjects = list(_subjects(shape, tensors, settings, able))
    subjects += _peers(shape, tensors, settings, absent, tell)
    seconds = measure(subjects, settings.rounds)
    rows = [Row(s.label, s.dtype, s.kind, s.params, s.moved, tuple(seconds[s.name])) for s in subjects]
    # what one shape held is gone before the next is made
    del subjects, tensors
    gc.collect()
    return Measured(shape.name, shape.title, len(shape.sizes), shape.params, rows)


def _subjects(shape: Shape, tensors: Tensors, settings: Settings, able: list[Pair]) -> Iterator[Subject]:
    """All but the peers: what ratios are to, halfstep, and torch."""
    # as large for few params as for many, so that it is no cache that answers
    yield from memory(settings.params)
    yield torch_step(tensors, fused=True)
    if settings.wants("torch"):
        yield torch_step(tensors, fused=False)
    chosen = [pair for pair in able if shape.every_format or pair[:2] in MAIN]
    for weights, moments, dtype in chosen:
        yield halfstep_step(tensors, dtype, weights, moments)
    whole = [pair for pair in chosen if pair[:2] in MAIN]
    if shape.every_format and whole:
        yield torch_whole(tensors)
        for weights, moments, dtype in whole:
            yield halfstep_whole(tensors, dtype, weights, moments)
    if not shape.every_format:
        # beside the many tensors, in the same rounds, so that the two are a pair
        single = Tensors(one(settings.params).sizes)
        for weights, moments, dtype in chosen:
            yield halfstep_step(single, dtype, weights, moments, where=SINGLE)


def _peers(shape: Shape, tensors: Tensors, settings: Settings, absent: dict[str, str], tell: Tell) -> Iterator[Subject]:
    for peer in PEERS:
        if not settings.wants(peer.package):
            continue
        if peer.version() is None:
            absent[peer.label] = 'not installed: pip install "halfstep[peers]"'
            continue
        tell(f"{peer.label}: making it ready")
        try:
            yield peer.step(tensors)
        except Exception as error:
            # Other libraries fail in any way they like; each is named, and the run goes on.
            said = str(error).strip().splitlines() or ["without a word"]
            absent[f"{peer.label}, {shape.title}"] = f"{type(error).__name__}: {said[0]}"


def _versions() -> dict[str, str]:
    found = {"halfstep": halfstep.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
    found |= {"numba": version("numba")}
    return found | {peer.package: peer.version() or "" for peer in PEERS if peer.version() is not None}
