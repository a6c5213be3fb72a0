"""The engine computes what MaxText does, in every family and form; see `agreement`."""

from __future__ import annotations

import pytest

from tests.maxtext import agreement

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("case", agreement.CASES, ids=str)
def test_log_probs_and_greedy_tokens(case):
    exact, rounded = agreement.measure(case)
    assert (exact.dtype, rounded.dtype) == ("float32", "bfloat16")
    assert exact.num_equal == exact.num_greedy, exact
    assert exact.difference <= 1e-4, exact
    # Rounding decides near ties in bfloat16; the engine rounds no more than MaxText does.
    assert rounded.error <= 1.25 * rounded.maxtext_error, rounded
    assert rounded.num_equal >= 0.6 * rounded.num_greedy, rounded
