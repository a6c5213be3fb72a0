"""Shows that the fast tests find deliberate faults: `python -m tests.mutants`.

Each of the forty *mutants* is one fault in one file, of a kind that somebody could write. The tool
puts them one after another into a copy of the repository, and runs the test modules there that
should find it. A mutant that they pass is one that `make test` would let through.

    python -m tests.mutants --only state-not-reset stop-string-sent
    python -m tests.mutants --all-tests

With `--all-tests` a mutant that its modules pass goes through the whole fast tier. Before any
mutant, the same tests must pass in the copy as it is; `--no-control` leaves that out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

ROOT = Path(__file__).parents[1]
ROOMS = "scheduler", "cache", "sampler", "weights", "states", "server", "long_tail", "adapter"
FAST = "not slow and not soak"
"""The marker expression of `make test`."""

NEEDED = 36
"""Mutants of all that must be caught."""

_TOGETHER = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
_ENGINE, _ADAPTER = "engine/sgljax_engine", "tunix_sgljax"

_CACHE = ".cache"
"""The folder of the checkout that its copy shares.

No mutant leaves anything there that another run would take for its own: programs are kept by
content. JAX's keys are made of what XLA compiles. Those of JIT-compiled CPU kernels
(`sgljax_cpu.kept_code`), and the names by which programs call them, are made of the kernels' LLVM
IR. What compiles that has a number, `machine._PIPELINE`, that is raised by hand: no mutant is in
`kernels`.
"""


class Mutant(NamedTuple):
    """A fault.

    Attributes:
        name: A short name.
        room: The part of the house that it is in, one of `ROOMS`.
        path: The file, from the root.
        old: Text that occurs in it exactly once.
        new: What stands there instead.
        tests: Modules that should find it first.
        why: What goes wrong for a user.
    """

    name: str
    room: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str


MUTANTS = (
    # ---------------------------------------------------------------- scheduler
    Mutant("page-room-off-by-one", "scheduler", f"{_ENGINE}/scheduler/scheduler.py",
           "len(request.pages) * self._pool.page_size - request.kv_len",
           "len(request.pages) * self._pool.page_size - request.kv_len + 1",
           ("tests/engine/test_scheduler.py",),
           "a token's keys are written behind the request's last page"),
    Mutant("admission-expects-no-growth", "scheduler", f"{_ENGINE}/scheduler/policy.py",
           "return math.ceil(self.new_token_ratio * request.num_remaining)",
           "return math.ceil(self.new_token_ratio)",
           ("tests/engine/test_scheduler.py",),
           "too many requests start, and are retracted and computed again"),
    Mutant("retracted-out-of-order", "scheduler", f"{_ENGINE}/scheduler/waiting.py",
           "bisect.insort(self._returned, request, key=_arrival)",
           "self._returned.append(request)",
           ("tests/engine/test_waiting_queue.py", "tests/engine/test_scheduler.py"),
           "of retracted requests the youngest goes on first"),
    Mutant("shortest-first", "scheduler", f"{_ENGINE}/scheduler/waiting.py",
           "ranks.append((not is_probe, -left, num_before[key], request.arrival, request))",
           "ranks.append((not is_probe, left, num_before[key], request.arrival, request))",
           ("tests/engine/test_start_order.py",),
           "the longest answers start last, and all other rows wait for them"),
    Mutant("drafts-behind-the-stop", "scheduler", f"{_ENGINE}/runner/programs/decode.py",
           "num_tokens = jnp.where(active, jnp.minimum(num_right, first_stop) + 1, 0)",
           "num_tokens = jnp.where(active, num_right + 1, 0)",
           ("tests/engine/test_speculation.py", "tests/engine/test_speculation_bits.py"),
           "with speculation an output goes on behind its stop token"),
    # ---------------------------------------------------------------- cache
    Mutant("update-keeps-prefixes", "cache", f"{_ENGINE}/core/commands/weights.py",
           "core.pool.reset_cache(slot)",
           "core.pool.settle()",
           ("tests/engine/test_prefix_cache.py", "tests/engine/test_kept_states.py"),
           "prompts go on from keys that older weights computed"),
    Mutant("adapters-share-prefixes", "cache", f"{_ENGINE}/cache/pool.py",
           "space = request.adapter - NO_ADAPTER",
           "space = 0",
           ("tests/engine/test_adapters.py",),
           "a request reads keys that another adapter computed"),
    Mutant("page-cached-too-early", "cache", f"{_ENGINE}/cache/pool.py",
           "first, num_full = handle.num_pages, request.num_computed // size",
           "first, num_full = handle.num_pages, (request.num_computed + 1) // size",
           ("tests/engine/test_scheduler.py", "tests/engine/test_prefix_cache.py"),
           "the next turn reads a page that lacks its last token's keys"),
    Mutant("window-ends-too-early", "cache", f"{_ENGINE}/cache/window.py",
           "max(num_tokens - self.sizes.num_tokens + 1, 0) // self._page_size",
           "max(num_tokens - self.sizes.num_tokens + 2, 0) // self._page_size",
           ("tests/engine/test_scheduler.py", "tests/engine/test_window_pages.py"),
           "a sliding layer reads zeros for the oldest key of its window"),
    Mutant("prefix-found-before-the-update", "cache", f"{_ENGINE}/cache/radix.py",
           "if known is not None and known.root is root:",
           "if known is not None:",
           ("tests/engine/test_radix.py",),
           "a request that waited through an update starts on older weights' keys"),
    # ---------------------------------------------------------------- sampler
    Mutant("seed-ignores-position", "sampler", f"{_ENGINE}/sampling/random_bits.py",
           "key = _threefry(key, (zero_B1, step_B.astype(jnp.uint32)[:, None]))",
           "key = _threefry(key, (zero_B1, 0 * step_B.astype(jnp.uint32)[:, None]))",
           ("tests/engine/test_sampler.py", "tests/engine/test_sampling_numerics.py"),
           "each token of a seeded sample is drawn with the same number"),
    Mutant("weakest-filter-wins", "sampler", f"{_ENGINE}/sampling/native.py",
           "return jnp.maximum(top, min_p_threshold(jnp.max(peaks.values, axis=-1), filters))",
           "return jnp.minimum(top, min_p_threshold(jnp.max(peaks.values, axis=-1), filters))",
           ("tests/engine/test_sampling_filters.py",),
           "tokens that top_p or top_k should drop are drawn"),
    Mutant("repetition-rewarded", "sampler", f"{_ENGINE}/sampling/table.py",
           "seen = jnp.where(seen > 0, seen / factor, seen * factor)",
           "seen = seen / factor",
           ("tests/engine/test_sampling_numerics.py",),
           "repetition_penalty makes unlikely tokens likelier"),
    Mutant("top-logprobs-of-the-first-step", "sampler", f"{_ENGINE}/runner/results.py",
           "return [extras_at(extras, (step, row), options) for step in range(count)]",
           "return [extras_at(extras, (0, row), options) for step in range(count)]",
           ("tests/engine/test_logprob_options.py",),
           "top log-probs are those of another position"),
    Mutant("samples-share-a-seed", "sampler", f"{_ENGINE}/sampling_params.py",
           "z = (seed + index * 0x9E3779B97F4A7C15) & _UINT64",
           "z = (seed + 0x9E3779B97F4A7C15) & _UINT64",
           ("tests/engine/test_sampling_table.py",),
           "all samples of a prompt but the first are the same"),
    # ---------------------------------------------------------------- weights
    Mutant("lora-scale-dropped", "weights", f"{_ENGINE}/weights/lora.py",
           "b.astype(jnp.float32) * jnp.float32(term.scale)",
           "b.astype(jnp.float32)",
           ("tests/engine/test_adapters.py", "tests/adapter/test_lora.py"),
           "a merged pair counts as if alpha were the rank"),
    Mutant("update-drops-adapters", "weights", f"{_ENGINE}/runner/serving_weights.py",
           "return dict(weights) | (self.slots or self._runner.empty_slots())",
           "return dict(weights) | self._runner.empty_slots()",
           ("tests/engine/test_adapters.py",),
           "after an update, requests with an adapter get the base model"),
    Mutant("refused-update-costs-the-weights", "weights", f"{_ENGINE}/core/commands/weights.py",
           "if isinstance(error, WeightsLostError):",
           "if isinstance(error, WeightSyncError):",
           ("tests/engine/test_finite.py", "tests/engine/test_adapters.py"),
           "one bad update ends all requests and leaves the engine without weights"),
    Mutant("axes-permuted-backwards", "weights", f"{_ENGINE}/weights/transform.py",
           "x = jnp.transpose(x, step.transpose)",
           "x = jnp.transpose(x, [step.transpose.index(axis) for axis in range(x.ndim)])",
           ("tests/engine/test_weights.py",),
           "a weight of three axes arrives transposed the wrong way"),
    Mutant("int8-rounds-down", "weights", f"{_ENGINE}/weights/forms.py",
           "jnp.round(x / scales)",
           "jnp.trunc(x / scales)",
           ("tests/engine/test_quantization.py",),
           "quantised weights are too small, with twice the error"),
    # ---------------------------------------------------------------- states
    Mutant("state-not-reset", "states", f"{_ENGINE}/runner/programs/recur.py",
           "is_first = blocks.firsts[:, None] + number == 0",
           "is_first = blocks.firsts[:, None] + number < 0",
           ("tests/engine/test_hybrid.py", "tests/engine/test_kept_states.py"),
           "a prompt goes on from the recurrent state of another request"),
    Mutant("fresh-state-copied-too-soon", "states", f"{_ENGINE}/cache/states.py",
           "source = self._fresh.get(page, kept.slot)",
           "source = kept.slot",
           ("tests/engine/test_state_hits.py", "tests/engine/test_kept_states.py"),
           "samples of a prompt start from a state that is not computed yet"),
    Mutant("sleep-forgets-a-page", "states", f"{_ENGINE}/runner/sleep.py",
           "self._kv_memory.save_pages(self._pool.used_pages, ",
           "self._kv_memory.save_pages(self._pool.used_pages[1:], ",
           ("tests/engine/test_sleep.py",),
           "after a sleep that keeps its state, a request reads an empty page"),
    Mutant("in-place-pause-goes-on", "states", f"{_ENGINE}/core/pause_state.py",
           'return self.mode in (None, "wait")',
           'return self.mode in (None, "wait", "in_place")',
           ("tests/engine/test_engine_core.py", "tests/engine/test_interrupt_machine.py"),
           "requests are sampled on while generation is paused"),
    Mutant("two-weights-of-one-version", "states", f"{_ENGINE}/core/commands/checkpoint.py",
           "core.serving.raise_version(restoration.weight_version + (not is_same))",
           "core.serving.raise_version(restoration.weight_version)",
           ("tests/engine/test_checkpoint.py",),
           "restored tokens of other weights have the version of the new ones"),
    # ---------------------------------------------------------------- server
    Mutant("conflict-is-bad-input", "server", f"{_ENGINE}/server/responses.py",
           'return HTTPError(409, str(error), kind="conflict_error")',
           'return HTTPError(400, str(error), kind="conflict_error")',
           ("tests/server/test_behaviour.py",),
           "a client is told that its request is wrong, and not to try again"),
    Mutant("stop-string-sent", "server", f"{_ENGINE}/processing/incremental_text.py",
           "self._max_overlap = max(map(len, self._stop), default=1) - 1",
           "self._max_overlap = min(map(len, self._stop), default=1) - 1",
           ("tests/engine/test_text.py",),
           "a stream sends the beginning of the longer one of two stop strings"),
    Mutant("zero-is-not-given", "server", f"{_ENGINE}/server/fields.py",
           "return {name: value for name, value in values.items() if value is not None}",
           "return {name: value for name, value in values.items() if value}",
           ("tests/server/test_openai.py", "tests/server/test_sglang.py"),
           "temperature 0 is ignored, and answers are random"),
    Mutant("text-offsets-of-the-ends", "server", f"{_ENGINE}/server/completions.py",
           "            offsets.append(progress.offset)\n"
           "            self._pass(token, progress, echoed if index < num_echoed else None)\n",
           "            self._pass(token, progress, echoed if index < num_echoed else None)\n"
           "            offsets.append(progress.offset)\n",
           ("tests/server/test_openai.py",),
           "text_offset is where a token ends"),
    Mutant("any-key-is-an-admins", "server", f"{_ENGINE}/server/routes.py",
           'key = "admin_key"',
           'key = "api_key"',
           ("tests/server/test_access.py", "tests/server/test_behaviour.py"),
           "whoever may generate may also load weights"),
    # ---------------------------------------------------------------- long_tail
    Mutant("carried-groups-asked-again", "long_tail", f"{_ADAPTER}/long_tail/asking.py",
           "num_more = groups.config.num_asked(len(numbers)) - len(groups)",
           "num_more = groups.config.num_asked(len(numbers))",
           ("tests/adapter/test_over_sampling_machine.py",),
           "groups in work count twice, and there are ever more of them"),
    Mutant("owed-prompt-lost", "long_tail", f"{_ADAPTER}/long_tail/feed.py",
           "self._owed.extend(rows)",
           "self._owed.extend(rows[1:])",
           ("tests/adapter/test_over_sampling.py",),
           "a run has fewer steps, and some prompts are never trained on"),
    Mutant("cut-groups-are-whole", "long_tail", f"{_ADAPTER}/long_tail/early_ends.py",
           "return Sampled(await samples, ended_early=is_early)",
           "return Sampled(await samples, ended_early=False)",
           ("tests/adapter/test_over_sampling.py",),
           "answers that were cut short are trained on by the reward of half a text"),
    Mutant("old-logprobs-shifted", "long_tail", f"{_ADAPTER}/long_tail/learner.py",
           "right_pad(output.logprobs, width, 0.0)",
           "right_pad([np.roll(row, 1) for row in output.logprobs], width, 0.0)",
           ("tests/adapter/test_replay.py",),
           "the ratio of each token is taken with its neighbour's log-prob"),
    Mutant("token-of-the-policy-before", "long_tail", f"{_ADAPTER}/in_flight/policy_versions.py",
           'side="right"',
           'side="left"',
           ("tests/adapter/test_policy_versions.py",),
           "the first tokens of new weights count as the older policy's"),
    # ---------------------------------------------------------------- adapter
    Mutant("mask-hides-inner-pads", "adapter", f"{_ADAPTER}/padding.py",
           "return np.logical_or.accumulate(reversed_BC, axis=1)[:, ::-1]",
           "return reversed_BC[:, ::-1]",
           ("tests/adapter/test_pad_is_eos.py",),
           "log-probs leave out pad ids that were sampled"),
    Mutant("rows-share-their-noise", "adapter", f"{_ADAPTER}/rollout/generating.py",
           "dataclasses.replace(params, seed=derive_seed(call_seed, row + 1))",
           "dataclasses.replace(params, seed=call_seed)",
           ("tests/adapter/test_generate.py",),
           "with a seed, a group's samples are all the same: no advantage"),
    Mutant("logprobs-without-temperature", "adapter", f"{_ADAPTER}/sampling.py",
           "return output.scaled_logprobs",
           "return output.logprobs",
           ("tests/adapter/test_in_flight.py",),
           "old log-probs are not those of the trainer's distribution"),
    Mutant("lora-alpha-not-over-rank", "adapter", f"{_ADAPTER}/lora.py",
           "return float(rule.alpha / rule.rank)",
           "return float(rule.alpha)",
           ("tests/adapter/test_lora.py",),
           "the rollout samples from other weights than the trainer's"),
    Mutant("keys-and-values-swapped", "adapter", f"{_ADAPTER}/mappings.py",
           '*(_heads("kv_einsum", name, part) for part, name in enumerate("kv")),',
           '*(_heads("kv_einsum", name, part) for part, name in enumerate("vk")),',
           ("tests/adapter/test_families.py",),
           "Gemma's keys are taken for values, which have the same shape"),
)  # fmt: skip


class Run(NamedTuple):
    """What tests said; `test` is the first that failed, or how else the run ended."""

    verdict: Literal["caught", "survived", "timeout", "broken"]
    test: str
    seconds: float

    @property
    def is_caught(self) -> bool:
        """Whether a test failed."""
        return self.verdict == "caught"


def pytest_configure() -> None:
    """Called in these runs, whose plugin this module is.

    Hypothesis neither looks for a smaller example that fails, which takes minutes, nor keeps it for
    the next mutant.
    """
    from hypothesis import Phase, settings

    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", database=None, deadline=None, phases=phases)
    settings.load_profile("mutants")


def table_problems() -> list[str]:
    """What is wrong with the table, a line each: code moves on."""
    found = [f"{name}: twice" for name, n in Counter(m.name for m in MUTANTS).items() if n > 1]
    for name, path, old in ((m.name, m.path, m.old) for m in MUTANTS):
        count = (ROOT / path).read_text(encoding="utf-8").count(old)
        if count != 1:
            found.append(f"{name}: its text occurs {count} times in {path}")
    paths = {path for mutant in MUTANTS for path in mutant.tests}
    found += [f"{path}: no such test module" for path in paths if not (ROOT / path).is_file()]
    found += [f"{m.name}: no room {m.room!r}" for m in MUTANTS if m.room not in ROOMS]
    return found


def make_copy(copy: Path) -> None:
    """Copies the files that git knows, as they are now, and links what tests keep."""
    listed = ["git", "ls-files", "-z"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, names.decode().split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    (ROOT / _CACHE).mkdir(exist_ok=True)
    (copy / _CACHE).symlink_to(ROOT / _CACHE)


def run_tests(copy: Path, tests: Sequence[str], limit_s: float) -> Run:
    """Runs fast tests of the copy until one fails.

    Args:
        copy: The repository's copy, whose packages come before those of an editable install.
        tests: Modules and options.
        limit_s: Seconds after which the run is ended.
    """
    parts = copy, copy / "engine", copy / "examples", copy / ".ci"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, parts))}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", FAST]
    command += ["-p", "no:cacheprovider", "-p", "tests.mutants", *tests]
    started = time.monotonic()
    # Not a pipe: what a test leaves running would keep it open.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        process = subprocess.Popen(command, cwd=copy, env=env, start_new_session=True, **pipes)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return Run("timeout", "", time.monotonic() - started)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file.seek(0)
        output = file.read()
    seconds = time.monotonic() - started
    if status == 0:
        return Run("survived", "", seconds)
    # With several processes pytest calls a run that ends at a failure interrupted: status 2. So it
    # does one whose modules cannot be imported, which shows nothing: the id is a file's alone.
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", output, re.MULTILINE)
    if status in (1, 2) and failed is not None:
        return Run("caught", failed[1], seconds)
    return Run("broken", f"status {status}: {output.strip()[-2000:]}", seconds)


def write(path: Path, text: str) -> None:
    """Writes a source of the copy."""
    path.write_text(text, encoding="utf-8")
    # Python knows a source by its size and the second of its change: two may agree in both.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def try_mutant(copy: Path, mutant: Mutant, limit_s: float, *, all_tests: bool) -> Run:
    """Runs the tests with the fault; the copy is as before when it returns."""
    path = copy / mutant.path
    source = path.read_text(encoding="utf-8")
    write(path, source.replace(mutant.old, mutant.new))
    try:
        run = run_tests(copy, mutant.tests, limit_s)
        if run.verdict == "survived" and all_tests:
            again = run_tests(copy, _TOGETHER, limit_s)
            run = again._replace(seconds=run.seconds + again.seconds)
        return run
    finally:
        write(path, source)


def table_of(runs: Sequence[tuple[Mutant, Run]]) -> str:
    """A table in Markdown, and a count."""
    lines = ["| mutant | room | what goes wrong | | first test | s |", "|---|---|---|---|---|---|"]
    for mutant, run in runs:
        test = run.test.splitlines()[0] if run.test else ""
        row = mutant.name, mutant.room, mutant.why, run.verdict, test, f"{run.seconds:.0f}"
        cells = (cell.replace("|", "\\|") for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    num_caught = sum(run.is_caught for _, run in runs)
    return "\n".join([*lines, "", f"{num_caught} of {len(runs)} caught."])


def say(text: str) -> None:
    """Prints, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 if too few mutants are caught, 2 if the run says nothing."""
    parser = argparse.ArgumentParser("python -m tests.mutants")
    names = [mutant.name for mutant in MUTANTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="of the table")
    parser.add_argument("--all-tests", action="store_true", help="for those that survive")
    parser.add_argument("--no-control", action="store_true", help="do not test the copy as it is")
    parser.add_argument("--limit", type=float, default=3600, help="seconds of a run of tests")
    given = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if mutant.name in (given.only or names)]
    problems = table_problems()
    if problems:
        say("\n".join(problems))
        return 2
    runs: list[tuple[Mutant, Run]] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder).resolve()
        make_copy(copy)
        if not given.no_control:
            modules = dict.fromkeys(path for mutant in chosen for path in mutant.tests)
            control = run_tests(copy, [*_TOGETHER, *(() if given.all_tests else modules)], 7200)
            say(f"{'without a fault':34} {control.verdict:9} {control.seconds:6.0f} s")
            if control.verdict != "survived":
                say(f"the tests do not pass as they are: {control.test}")
                return 2
        for mutant in chosen:
            run = try_mutant(copy, mutant, given.limit, all_tests=given.all_tests)
            say(f"{mutant.name:34} {run.verdict:9} {run.seconds:6.0f} s  {run.test}")
            runs.append((mutant, run))
    say(f"\n{table_of(runs)}")
    num_caught = sum(run.is_caught for _, run in runs)
    return int(num_caught < min(NEEDED, len(runs)))


if __name__ == "__main__":
    sys.exit(main())
