"""Token counts against counting everything anew."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sgljax_engine.sampling.token_counts import TokenCounts

TOKENS = st.integers(0, 30)


@given(st.lists(TOKENS, min_size=1), st.lists(st.lists(TOKENS)))
def test_counts_as_a_request_grows(prompt, pieces):
    seen, output = TokenCounts(prompt), []
    for piece in [[], *pieces]:
        output.extend(piece)
        seen.update(output)
        in_output = Counter(output)
        assert len(seen) == len({*prompt, *output})
        assert seen.ids.dtype == seen.counts.dtype == np.int32
        found = dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True))
        assert found == {token: in_output[token] for token in {*prompt, *output}}
