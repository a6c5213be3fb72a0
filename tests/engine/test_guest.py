"""A polite guest: it works under the host process's JAX settings and leaves none behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.compilation import CACHE
from tests.threads import LIMIT_S

SCRIPT = """
import signal, threading
import jax, numpy as np
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "standard")
jax.config.update("jax_compilation_cache_dir", {cache!r})
from sgljax_engine import Engine, SamplingParams
from tests import inside
from tests.engine.models import TINY, random_prompts, spread_weights
from tests.geometry import SMALL

handlers = {{s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}}
before = {{name: getattr(jax.config, name) for name in ("jax_enable_x64", "jax_debug_nans")}}
params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=1, max_new_tokens=8)
with Engine(model_config=TINY, weights=spread_weights(), **SMALL) as engine:
    outs = engine.generate_requests(random_prompts(3, 1, 30), params)
    engine.update_weights(spread_weights())
    again = engine.generate_requests(random_prompts(3, 1, 30), params)
    assert [o.output_ids for o in outs] == [o.output_ids for o in again]
    engine.score([[1, 2, 3]])
    assert all(w.dtype == np.float32 for w in inside.runner(engine).weights.values())
assert handlers == {{s: signal.getsignal(s) for s in handlers}}
assert before == {{name: getattr(jax.config, name) for name in before}}
print([o.output_ids for o in outs])
engine = Engine(model_config=TINY, weights=spread_weights(), **SMALL)
engine.generate(input_ids=[1], sampling_params={{"max_new_tokens": 2}})
# No shutdown: the interpreter must still end by itself, and cleanly.
"""


@pytest.mark.slow
def test_under_unusual_jax_settings():
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(cache=str(CACHE))],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.startswith("[[")
    assert "Traceback" not in result.stderr


STREAMS = """
import gc, os
import jax
jax.config.update("jax_compilation_cache_dir", {cache!r})
from sgljax_engine import Engine
from tests import inside
from tests.engine.models import TINY, spread_weights
from tests.geometry import SMALL

engine = Engine(model_config=TINY, weights=spread_weights(), **SMALL)
stream = lambda: engine.generate(None, {{"max_new_tokens": 200}}, [1], stream=True)

# A collection that ends a stream, and then one that ends the engine of this loop, both while a
# thread submits something else to it.
group, getpid = inside.group(engine), os.getpid
def collecting():
    if group._lock._is_owned():
        os.getpid = getpid
        gc.collect()
    return getpid()

cycle = [stream()]
cycle.append(cycle)
del cycle
os.getpid = collecting  # which `submit` asks
engine.get_internal_state()
assert engine.get_internal_state().running_batch_size == 0

from concurrent.futures import Future
from sgljax_engine.core import commands
engine.cycle = engine
del engine, stream
os.getpid = collecting  # which `submit` asks
future = Future()
try:
    group.submit(commands.GetState(future))
    error = future.exception(60)
except Exception as refusal:
    error = refusal
assert type(error).__name__ == "EngineShutdownError"

engine = Engine(model_config=TINY, weights=spread_weights(), **SMALL)
half_read = engine.generate(None, {{"max_new_tokens": 200}}, [1], stream=True)
next(half_read)
print("ok")
# Neither closed nor shut down: the interpreter must still end by itself, and cleanly.
"""


@pytest.mark.slow
def test_collections_and_the_end_of_the_interpreter():
    """In a process of its own: on a failure nothing but its end would get the threads out."""
    result = subprocess.run(
        [sys.executable, "-c", STREAMS.format(cache=str(CACHE))],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout == "ok\n"
    assert "Traceback" not in result.stderr
