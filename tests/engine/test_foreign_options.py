"""Names of other engines' options get an error that says what they are called here."""

from __future__ import annotations

import pytest

from sgljax_engine import (
    FOREIGN_OPTIONS,
    EngineConfig,
    InvalidConfigError,
)


@pytest.mark.parametrize("name", FOREIGN_OPTIONS)
def test_every_name_is_refused_with_its_own_hint(name):
    with pytest.raises(InvalidConfigError) as caught:
        EngineConfig.from_options({name: 1})
    assert str(caught.value) == f"unknown engine option {name!r}; {FOREIGN_OPTIONS[name].hint}"
    assert "did you mean" not in str(caught.value)


def test_no_name_is_an_option_here_and_every_counterpart_is():
    names = set(EngineConfig.option_names())
    assert not names & FOREIGN_OPTIONS.keys()
    for option in FOREIGN_OPTIONS.values():
        assert option.option in names or (option.option is None and option.note)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_num_seqs", "it is vLLM's name of 'max_running_requests'"),
        ("gpu_memory_utilization", "vLLM's name of 'mem_fraction_static', of the memory beside"),
        ("enable_prefix_caching", "vLLM's name of the opposite of 'disable_radix_cache'"),
        ("pp_size", "without a counterpart here: the rollout's or engine's `mesh` decides"),
    ],
)
def test_hints(name, hint):
    with pytest.raises(InvalidConfigError, match=hint):
        EngineConfig.from_options({name: 1})


def test_a_value_and_its_opposite():
    prefix_caching = FOREIGN_OPTIONS["enable_prefix_caching"]
    assert [prefix_caching.translate(value) for value in (True, False)] == [False, True]
    with pytest.raises(InvalidConfigError, match=r"enable_prefix_caching must be .* got 'yes'"):
        prefix_caching.translate("yes")
    assert FOREIGN_OPTIONS["max_num_seqs"].translate(7) == 7
