"""The GPU backend without a GPU: what it computes, in Triton's interpreter, in processes that are told to use it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the GPU's backend needs Triton")

#: one process each, as names of tests that go into it and how many these are at least
PARTS = {"adam or clip or scaler": 40, "not (adam or clip or scaler)": 150}


@pytest.mark.timeout(900)
def test_p10_in_the_interpreter_the_bits_are_those_of_eager() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/interpreted.py",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "600",
        "-k",
    ]
    where = Path(__file__).parent.parent
    runs = [
        subprocess.Popen(
            [*command, names], cwd=where, env=os.environ | {"TRITON_INTERPRET": "1"}, stdout=subprocess.PIPE, text=True
        )
        for names in PARTS
    ]
    for run, least in zip(runs, PARTS.values(), strict=True):
        told, _ = run.communicate()
        assert run.returncode == 0, told[-5000:]
        assert len(re.findall(r"\.", told.partition("[100%]")[0])) >= least, told
