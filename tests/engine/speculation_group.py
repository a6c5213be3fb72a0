"""Speculation in a group of engines; run in a process of its own with four devices."""

from __future__ import annotations

from sgljax_engine import SamplingParams
from tests import inside
from tests.engine.group_cases import PROMPTS, check_idle, make, mesh_of

PARAMS = [
    SamplingParams(temperature=0.8, max_new_tokens=24, seed=seed, ignore_eos=True)
    for seed in range(len(PROMPTS))
]


def main() -> None:
    """Samples are those of one engine without drafts, whoever has which request."""
    with make(None) as engine:
        expected = [out.output_ids for out in engine.generate_requests(PROMPTS, PARAMS)]
    mesh = mesh_of((4,), ("fsdp",))
    with make(mesh, speculation="always", speculative_num_draft_tokens=3) as engine:
        for order in (1, -1):  # the second time many prompts come to other engines
            found = engine.generate_requests(PROMPTS[::order], PARAMS[::order])
            assert [out.output_ids for out in found][::order] == expected
        each = [core.counters.num_accepted_history for core in inside.cores(engine)]
        assert len(each) == 4
        assert min(each) > 0, each
        speculators = [core._speculator for core in inside.cores(engine)]
        drafters = {id(one._drafters["history"]) for one in speculators if one is not None}
        assert len(drafters) == 1
        check_idle(engine)


if __name__ == "__main__":
    main()
