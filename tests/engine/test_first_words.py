"""What an engine says to somebody who meets it: misplaced arguments, sleep, empty weights."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sgljax_engine import Engine, InvalidRequestError, WeightSyncError
from tests.engine.models import TINY, spread_weights
from tests.geometry import SMALL

FOLDER = Path(__file__).parents[1] / "golden" / "qwen3_gqa_tied"
QUICK_COMPILE = "what is printed while an engine starts"


@pytest.fixture(scope="module")
def engine():
    with Engine(model_config=TINY, weights=spread_weights(), **SMALL) as engine:
        yield engine


def test_a_sampling_field_as_a_keyword(engine):
    """As other APIs take it."""
    with pytest.raises(InvalidRequestError, match=r"sampling_params=\{'temperature': 0\}"):
        engine.generate(input_ids=[1, 2], temperature=0)
    with pytest.raises(InvalidRequestError, match="generate takes no keyword 'prompts'"):
        engine.generate(prompts=["a"])


class Seen(logging.Handler):
    """Keeps the messages, and tells of the first one."""

    def __init__(self):
        super().__init__()
        self.messages = []
        self.any = threading.Event()

    def emit(self, record):
        self.messages.append(record.getMessage())
        self.any.set()


def test_generate_says_that_it_waits_for_a_sleeping_engine(engine):
    assert engine.sleep(1)
    answers = []
    params = {"temperature": 0, "max_new_tokens": 2}
    call = threading.Thread(
        target=lambda: answers.append(engine.generate(input_ids=[1, 2], sampling_params=params))
    )
    seen, logger = Seen(), logging.getLogger("sgljax_engine")
    logger.addHandler(seen)
    try:
        call.start()
        assert seen.any.wait(60)
    finally:
        logger.removeHandler(seen)
    assert "the engine sleeps" in seen.messages[0]
    assert engine.is_sleeping()
    engine.wake_up()
    call.join()
    assert len(answers[0]["output_ids"]) == 2


def test_an_empty_source_is_refused_in_a_screenful(engine):
    with pytest.raises(WeightSyncError) as caught:
        engine.update_weights({})
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("weights do not fit the model (")
    assert len(lines) <= 22


@pytest.mark.slow
def test_a_tokenizer_comes_without_advice_to_install_pytorch():
    """It is the first line on the screen otherwise, and nothing here uses PyTorch."""
    code = (
        "import sys; from sgljax_engine.processing.tokenizer_folder import load_tokenizer; "
        "load_tokenizer(sys.argv[1])"
    )
    command = [sys.executable, "-c", code, str(FOLDER)]
    # Examples that other tests import set the variable.
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRANSFORMERS")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert "PyTorch" not in done.stderr
