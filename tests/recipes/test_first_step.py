"""The benchmark of a new user's first step times what a program prints."""

import sys

import pytest
import tools.recipes  # noqa: F401  # makes the benchmarks importable

import first_step  # isort: skip

DEMO = r"""
import sys, time
say = lambda text: (sys.stderr.write(text), sys.stderr.flush(), time.sleep(0.2))
say("Collecting torch\n")
say("Successfully installed pip-26.0\n")
say("Successfully installed flashmask-hf-0.1.0 torch-2.13.0\n")
say("\rTokenizing train dataset: 100%|####| 24/24 [00:00<00:00]\n")
say("\r  0%|          | 0/286 [00:00<?, ?it/s]")
say("\r  0%|          | 1/286 [00:00<01:20,  3.56it/s]")
say("\nPicture of the loss and of the mask of one row: picture.png\n" if sys.argv[1] == "all" else "\nno\n")
"""


def test_stages_are_timed_when_they_are_printed(tmp_path):
    found = first_step.passed([sys.executable, "-c", DEMO, "all"], tmp_path)
    assert list(found) == ["environment installed", "first training step", "trained and answered"]
    installed, stepped, answered = found.values()
    assert installed > 0.3  # after pip itself
    assert stepped - installed > 0.5  # three prints later
    assert 0.1 < answered - stepped < 0.5


def test_a_demo_that_fails_or_stops_early_is_no_measurement(tmp_path):
    with pytest.raises(RuntimeError, match="did not pass all stages"):
        first_step.passed([sys.executable, "-c", DEMO, "part"], tmp_path)
    with pytest.raises(RuntimeError, match="no module"):
        first_step.passed([sys.executable, "-c", f"{DEMO}\nsys.exit('no module')", "all"], tmp_path)
