"""The worked examples of CONTRIBUTING.md do what they say, on every backend."""

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep import primitives
from halfstep.backends import BACKENDS, eager, traced
from halfstep.contracts import Format, Plan, Rule
from halfstep.formats import FLOAT32
from halfstep.formats.split import SPLIT_BF16
from harness import CPU, HERE, assert_same, copy, job, load, run, store

TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()


def example(title: str, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run the first block of code under a heading, where the names of ``before`` are known; return all names."""
    section = re.split(rf"^## {title}$", TEXT, flags=re.MULTILINE)[1]
    code = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)[0]
    names: dict[str, Any] = {**(before or {}), "__name__": "example"}
    exec(code, names)
    return names


@pytest.mark.parametrize("backend", [name for name in HERE if name != "eager"])
def test_a_new_rule_is_one_file(backend: str) -> None:
    rule: Rule = example("A new rule")["HEAVY_BALL"]
    plan = Plan(rule, SPLIT_BF16, (FLOAT32,), FLOAT32, CPU)
    want = job(plan, (1000,), 0, 1)
    got = copy(want)
    before = want.param.clone()
    run(plan, [want], "eager")
    run(plan, [got], backend)
    for a, b in zip((want.param, *want.state), (got.param, *got.state), strict=True):
        assert_same(a, b)
    assert not torch.equal(want.param, before)


def test_a_new_rule_computes_its_equation(backend: str) -> None:
    rule: Rule = example("A new rule")["HEAVY_BALL"]
    plan = Plan(rule, FLOAT32, (FLOAT32,), FLOAT32, CPU)
    one = job(plan, (1000,), 0, 1)
    weight, buffer, grad = one.param.double(), one.state[0].double(), one.grad.double()
    factor, momentum, lr = one.scalars
    run(plan, [one], backend)
    buffer = momentum * buffer + factor * grad
    # scalars, products and sums round five times, at no more than the largest gradient's size: 5 * 2**-24 < 2**-21
    torch.testing.assert_close(one.state[0].double(), buffer, rtol=2.0**-21, atol=2.0**-21 * float(grad.abs().max()))
    torch.testing.assert_close(one.param.double(), weight - lr * buffer, rtol=2.0**-21, atol=2.0**-21)


def test_a_new_primitive_is_a_word_of_every_backend(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = re.findall(r'`"absolute": (.*?)`', TEXT)
    assert len(words) == len(BACKENDS)
    modules = [eager, traced]
    if importlib.util.find_spec("triton"):
        modules.append(importlib.import_module("halfstep.backends.jitted"))
    for module, word in zip(modules, words, strict=False):
        monkeypatch.setitem(module.WORDS, "absolute", eval(word, dict(vars(module))))
    # which the example's decorator then fills
    monkeypatch.setitem(primitives.VOCABULARY, "absolute", len)
    names = example("A new primitive", vars(primitives))
    exec("def store_magnitude(weight):\n    return (absolute(weight),)", names)
    format = Format("magnitude", FLOAT32.parts, FLOAT32.load, names["store_magnitude"])
    values = torch.randn(1000)
    (kept,) = store(format, values, backend)
    assert_same(kept, values.abs())


def test_a_new_format_is_one_file(backend: str) -> None:
    format: Format = example("A new format")["TRUNCATED"][torch.bfloat16]
    values = torch.randn(1000)
    loaded = load(format, store(format, values, backend), backend)
    assert (loaded.abs() <= values.abs()).all()
    # what is dropped is less than a bfloat16's last place, 2**-7 of the number
    assert ((values - loaded).abs() < values.abs() * 2.0**-7).all()
    assert not torch.equal(loaded, values.bfloat16().float()), "it rounds"
