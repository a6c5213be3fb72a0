"""Which modules may have XLA optimise little: those that look at host logic alone (see conftest).

What checks numbers must run the programs that users run. So a module with `QUICK_COMPILE` must not
compare arrays, log-probs, tokens of two runs, checksums or goldens, nor call what does. A line that
only looks like it, as a mean of seconds does, ends in `# not computed`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.quick_compile import MARK

TESTS = Path(__file__).parent

NO_USERS = {
    "test_gpu_experts.py",
    "test_gpu_invariant.py",
    "test_gpu_products.py",
    "test_pallas_attention.py",
    "test_prefill_tiles.py",
    "test_remote_devices.py",
    "test_shared_runs.py",
    "test_tpu_attention.py",
}
"""They check what no user compiles: kernels of GPUs and TPUs that a CPU interprets, and devices of
another process that a CPU stands for."""

_COMPARISONS = re.compile(
    r"(np|jnp|numpy)\.testing|allclose|array_equal|assert_array|isclose|\bapprox\b|tobytes"
    r"|checksum|bits_of|differing|mismatch|golden\.npz|(?<!tunix_)(?<!\.)reference"
)
"""Names of what compares numbers, or of what numbers are compared with."""

_EXEMPT = "# not computed"

_NUMBERS = re.compile(r"log_?probs?|logits|output_ids|token_ids|\bids\b|\btokens\b|samples")
"""Names of what programs compute."""


def marked() -> dict[Path, ast.Module]:
    """The modules with the mark, and what they hold."""
    paths = [path for path in sorted(TESTS.rglob("test_*.py")) if MARK in path.read_text()]
    trees = {path: _parse(path) for path in paths}  # of few, since parsing all takes seconds
    return {path: tree for path, tree in trees.items() if _reason(tree) is not None}


def number_checks(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of all that compares numbers, in a module and in what it takes from `tests`."""
    yield from _checks(tree)
    for name, definition in _taken(tree):
        for _, text in _checks(definition):
            yield definition.lineno, f"{name} (of another module): {text}"


def test_marked_modules_check_no_numbers():
    """One line a module and comparison, so that the failure says what to do."""
    found = [
        f"{path.relative_to(TESTS.parent)}:{line}: {text}"
        for path, tree in marked().items()
        if path.name not in NO_USERS
        for line, text in number_checks(tree)
    ]
    assert found == [], f"{MARK} goes, or the comparison moves to a module without it"


def test_the_mark_says_why():
    for path, tree in marked().items():
        reason = _reason(tree)
        assert isinstance(reason, ast.Constant), path
        assert isinstance(reason.value, str), path
        assert len(reason.value) > 10, path


def test_the_mark_is_the_only_way():
    """Scripts that tests run in processes of their own compile as the module that runs them."""
    option = re.compile(r'update\(\s*"jax_disable_most|JAX_DISABLE_MOST')
    paths = set(TESTS.rglob("*.py")) - {Path(__file__)}
    found = {str(path.relative_to(TESTS)) for path in paths if option.search(path.read_text())}
    # The mark itself, and compilers of other devices, which it never reaches.
    assert found == {"quick_compile.py", "aot/topologies.py"}


@pytest.mark.parametrize(
    "line",
    [
        "np.testing.assert_array_equal(a, b)",
        "assert np.allclose(a, b)",
        "assert out.logprobs[-1] == pytest.approx(value)",
        "assert out.logprobs == other.logprobs",
        "assert a.output_ids == b.output_ids",
        "assert [o['output_ids'] for o in outs] == expected",
        "assert engine.get_weights_checksum() == before",
        "assert ids(outs) == ids(others)",
        "assert abs(a.logprobs[0] - b) < 1e-3",
        "golden = np.load(FOLDER / 'golden.npz')",
        "assert a.tobytes() == b.tobytes()",
        "from tests.engine.determinism_cases import ask",
    ],
)
def test_a_comparison_is_found(line):
    assert list(number_checks(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "assert len(out.output_ids) == 5",
        "assert out.logprobs is None",
        "assert out.finish.kind == 'abort'",
        "assert state.num_tokens == 12",
        "assert batch.tokens.shape == batch.is_target.shape",
        "with pytest.raises(InvalidRequestError, match='logprobs'): pass",
    ],
)
def test_host_logic_is_not_taken_for_a_comparison(line):
    assert not list(number_checks(ast.parse(line)))


def test_a_line_may_say_that_nothing_was_computed(tmp_path):
    path = tmp_path / "test_seconds.py"
    path.write_text(
        f"assert seconds == pytest.approx(1.0)  {_EXEMPT}\n"
        f"def test():\n    assert a.logprobs == b.logprobs\n    x = approx  {_EXEMPT}\n"
    )
    assert [line for line, _ in number_checks(_parse(path))] == [3]


@functools.cache
def _parse(path: Path) -> ast.Module:
    """What a module holds; marks what begins on a line that says that nothing was computed."""
    lines = path.read_text(encoding="utf-8").splitlines()
    tree = ast.parse("\n".join(lines))
    exempt = {number for number, line in enumerate(lines, 1) if line.endswith(_EXEMPT)}
    for node in ast.walk(tree):
        if getattr(node, "lineno", None) in exempt:
            node.is_exempt = True  # type: ignore[attr-defined]
    return tree


def _reason(tree: ast.Module) -> ast.expr | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == MARK:
            return node.value
    return None


def _taken(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Functions and classes of other modules of `tests` that a module names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            path = TESTS.parent / f"{(node.module or '').replace('.', '/')}.py"
            if not path.is_file():  # a module, taken from its package
                continue
            names = {alias.name for alias in node.names}
            yield from (
                (definition.name, definition)
                for definition in _parse(path).body
                if isinstance(definition, (ast.FunctionDef, ast.ClassDef))
                and definition.name in names
            )


def _checks(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if getattr(node, "is_exempt", False):
            continue
        if isinstance(node, (ast.Name, ast.Attribute, ast.alias)):
            name = node.name if isinstance(node, ast.alias) else ast.unparse(node)
            if _COMPARISONS.search(name):
                yield getattr(node, "lineno", 0), name
        elif isinstance(node, ast.Constant) and str(node.value).endswith("golden.npz"):
            yield node.lineno, "golden.npz"
        elif isinstance(node, ast.Compare) and _compares_numbers(node):
            yield node.lineno, ast.unparse(node)


def _compares_numbers(node: ast.Compare) -> bool:
    """Whether it compares what programs compute with something else than a constant."""
    sides = [node.left, *node.comparators]
    is_distance = "abs(" in ast.unparse(node.left)
    if any(isinstance(side, ast.Constant) for side in sides) and not is_distance:
        return False
    if not all(
        isinstance(op, (ast.Eq, ast.NotEq, ast.Lt, ast.Gt, ast.LtE, ast.GtE)) for op in node.ops
    ):
        return False
    return any(_NUMBERS.search(_without_sizes(side)) for side in sides)


def _without_sizes(node: ast.expr) -> str:
    """Its source without lengths, shapes and dtypes, which are no numbers that programs compute."""

    class Sizes(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            is_size = isinstance(node.func, ast.Name) and node.func.id == "len"
            return ast.Name("size") if is_size else self.generic_visit(node)

        def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
            is_size = node.attr in ("shape", "dtype")
            return ast.Name("size") if is_size else self.generic_visit(node)

    return ast.unparse(Sizes().visit(ast.parse(ast.unparse(node), mode="eval")))
