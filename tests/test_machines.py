"""P30 and P32: what a machine lacks is found out before compiling, and explained; a request by name raises."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from halfstep import backends
from halfstep.backends import Unavailable, eager
from harness import HERE, assert_same
from training import Snapshot, assert_alike, drive, make, params

TRAIN = """
import sys, torch, halfstep
def train(half, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3).to(half)
    optimizer = halfstep.AdamW(model.parameters(), **options)
    for _ in range(3):
        model(torch.ones(2, 5, dtype=half)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.isfinite().all() for p in model.parameters())
    return optimizer.explain()
"""


def python(script: str, **environment: str) -> str:
    """What ``script`` prints in a process of its own; its errors where it fails."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture
def _forgetful() -> Iterator[None]:
    """Choices made while a test bends the machine are not kept."""
    caches = (backends.load, backends.choose, backends.kernel, eager.has_float64)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_p32_a_cpu_without_float16_conversions_is_served_by_eager() -> None:
    script = TRAIN + (
        "text = train(torch.float16)\n"
        "assert 'backend eager' in text, text\n"
        "assert 'not cpu: the CPU that Numba compiles for has no float16 conversions (F16C)' in text, text\n"
        "assert 'backend cpu' in train(torch.bfloat16)\n"
        "try:\n"
        "    train(torch.float16, backend='cpu')\n"
        "except halfstep.backends.Unavailable as error:\n"
        "    print(error)\n"
    )
    text = python(script, NUMBA_CPU_NAME="x86-64", NUMBA_CPU_FEATURES="")
    want = (
        "backend='cpu' cannot run here: not cpu: the CPU that Numba compiles for has no float16 conversions (F16C). Use"
    )
    assert text.startswith(want)


def test_p32_without_numba_eager_serves() -> None:
    script = (
        "import sys\nsys.modules['numba'] = None\n"
        + TRAIN
        + "for half in (torch.float16, torch.bfloat16, torch.float32):\n"
        "    text = train(half)\n"
        "    assert 'backend eager: PyTorch operators on cpu (not cpu: numba cannot be imported' in text, text\n"
        "try:\n"
        "    train(torch.float16, backend='cpu')\n"
        "except halfstep.backends.Unavailable as error:\n"
        "    print(error)\n"
    )
    text = python(script)
    assert text.startswith("backend='cpu' cannot run here: not cpu: numba cannot be imported")
    assert "Use backend='auto' or 'eager'." in text


def test_importing_is_quick_and_leaves_the_compilers_alone() -> None:
    script = (
        "import sys, time, torch\n"
        "before, start = set(sys.modules), time.perf_counter()\n"
        "import halfstep\n"
        "took = time.perf_counter() - start\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert not new & {'numba', 'llvmlite', 'triton', 'typer', 'rich', 'matplotlib', 'scipy',"
        " 'accelerate', 'transformers', 'peft', 'lightning', 'lightning_fabric', 'pytorch_lightning'}, new\n"
        "assert 'torch._dynamo' not in sys.modules and 'torch._inductor' not in sys.modules\n"
        "assert 'halfstep.cli' not in sys.modules and 'halfstep.backends.cpu' not in sys.modules\n"
        "print(took)\n"
    )
    # a twentieth of a second where nothing else runs; what would take long is named above
    assert float(python(script)) < 2


@pytest.mark.usefixtures("_forgetful")
def test_p32_a_device_without_float64(monkeypatch: pytest.MonkeyPatch, half: torch.dtype) -> None:
    plain = make("AdamW", params(half), backend="eager")
    drive(plain, range(3))
    monkeypatch.setattr(eager, "has_float64", lambda device: False)
    monkeypatch.setattr(torch.Tensor, "double", None)  # what such a device refuses
    optimizer = make("AdamW", params(half), backend="eager")
    drive(optimizer, range(3))
    assert "own square root is used: it has no float64" in optimizer.explain()
    for param, other in zip(optimizer.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True):
        # a square root may be off by an ulp, and the weight then by one step's: far under an ulp of a 16-bit param
        torch.testing.assert_close(param.float(), other.float(), rtol=2 * torch.finfo(half).eps, atol=1e-6)


@pytest.mark.usefixtures("_forgetful")
def test_p30_a_backend_asked_for_by_name_raises_where_it_cannot_run(
    monkeypatch: pytest.MonkeyPatch, half: torch.dtype
) -> None:
    cpu = backends.load("cpu")
    assert not isinstance(cpu, str)
    optimizer = make("AdamW", params(half), backend="auto")
    assert "backend cpu" in optimizer.explain()
    backends.choose.cache_clear()
    monkeypatch.setattr(type(cpu), "refuses", lambda self, device, dtypes: "it is Sunday")
    text = r"backend='cpu' cannot run here: not cpu: it is Sunday. Use backend='auto' or 'eager'."
    with pytest.raises(Unavailable, match=text):
        make("AdamW", params(half), backend="cpu")
    before = Snapshot(optimizer)
    with pytest.raises(Unavailable, match=text):
        optimizer.add_param_group({"params": params(half), "backend": "cpu"})
    before.check()
    # what was not asked for falls back, and says so
    assert "backend eager: PyTorch operators on cpu (not cpu: it is Sunday)" in optimizer.explain()
    drive(optimizer, range(1))


def test_p30_a_backend_that_the_devices_rule_out_raises(half: torch.dtype) -> None:
    made = [torch.nn.Parameter(torch.empty(2, dtype=half, device="meta"))]
    with pytest.raises(Unavailable, match=r"backend='cpu' cannot run here: not cpu: the tensors are on meta. Use"):
        make("AdamW", made, backend="cpu")
    assert "backend eager: PyTorch operators on meta" in make("AdamW", made).explain()


def test_p30_every_backend_that_is_named_runs(half: torch.dtype) -> None:
    optimizers = [make("AdamW", params(half), backend=name) for name in HERE]
    for optimizer, name in zip(optimizers, HERE, strict=True):
        drive(optimizer, range(2))
        assert f"backend {name}: " in optimizer.explain()
        optimizer.param_groups[0]["backend"] = "auto"
        assert_alike(optimizer, optimizers[0])
    for param, other in zip(optimizers[0].state, optimizers[-1].state, strict=True):
        assert_same(param.detach(), other.detach())


CUDA = torch.device("cuda", 0)


def test_p30_without_triton_a_gpu_is_served_by_eager_and_a_cpu_does_not_miss_it() -> None:
    script = (
        "import sys\nsys.modules['triton'] = None\n" + TRAIN + "assert 'backend cpu: Numba' in train(torch.float16)\n"
        "choice = halfstep.backends.choose(torch.device('cuda', 0), frozenset({torch.float16}), 'auto')\n"
        "assert choice.backend.name == 'eager'\n"
        "assert 'halfstep.backends.cpu' in sys.modules\n"
        "print(choice.reason)\n"
        "try:\n"
        "    train(torch.float16, backend='gpu')\n"
        "except halfstep.backends.Unavailable as error:\n"
        "    print(error)\n"
    )
    reason, error, *_ = python(script).splitlines()
    assert reason.startswith("not gpu: triton cannot be imported")
    assert error.startswith("backend='gpu' cannot run here: not gpu: triton cannot be imported")


def test_stepping_on_a_cpu_leaves_triton_alone() -> None:
    # torch itself may import it, for its compiler
    script = TRAIN + "train(torch.float16)\ntrain(torch.bfloat16, weights='split8')\n"
    assert python(script + "print([m for m in sys.modules if m.startswith('halfstep.backends.')])").count("cpu") == 1
    assert "jitted" not in python(script + "print(list(sys.modules))")


@pytest.mark.usefixtures("_forgetful")
def test_p30_the_gpus_backend_says_what_it_cannot_step(monkeypatch: pytest.MonkeyPatch, half: torch.dtype) -> None:
    gpu = pytest.importorskip("halfstep.backends.gpu")
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    with pytest.raises(Unavailable, match=r"backend='gpu' cannot run here: not gpu: the tensors are on cpu. Use back"):
        make("AdamW", params(half), backend="gpu")
    dtypes = frozenset({half})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    choice = backends.choose(CUDA, dtypes, "auto")
    assert choice.backend.name == "eager"
    assert choice.reason == "not gpu: Triton wants compute capability 8.0 or above, and cuda:0 has 7.5"
    backends.choose.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert backends.choose(CUDA, dtypes, "auto") == (backends.load("gpu"), "")


def test_p30_only_a_gpu_counts_its_own_steps(half: torch.dtype) -> None:
    with pytest.raises(
        ValueError, match=r"capturable=True: param 0 of group 0 is on cpu, where the backend is cpu; only"
    ):
        make("AdamW", params(half), capturable=True)
    for value in (1, "yes"):
        with pytest.raises(ValueError, match=rf"capturable={value!r}: must be True or False"):
            make("AdamW", params(half), capturable=value)
    optimizer = make("AdamW", params(half))
    with pytest.raises(ValueError, match="capturable=True: param 0 of group 1 is on cpu"):
        optimizer.add_param_group({"params": params(half), "capturable": True})
    assert len(optimizer.param_groups) == 1
