"""The host's work for a dispatch, on a few dispatches."""

from benchmarks.throughput import scheduler_growth


def test_requests_that_come_and_go():
    result = scheduler_growth.churn(waiting=4, num_steps=2)
    assert (result.rows, result.waiting) == (scheduler_growth.ROWS, 4)
    assert result.total_ms > 0


def test_rows_that_only_decode():
    result = scheduler_growth.steady("penalties", 8, 64, 2, frequency_penalty=0.5)
    assert (result.rows, result.context) == (8, "64")
    assert result.batch_ms > 0
