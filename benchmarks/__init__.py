"""Measurements, in folders by what they measure.

- `throughput`: tokens a second: against peers, and what each option costs.
- `interruption`: pauses, sleep, checkpoints and new weights, under load.
- `exactness`: what comes out: log-probs against the trainer's.
- `serving`: what HTTP costs.
- `start_up`: cold and warm starts.
- `hardware`: what a machine can do at best, and how near the engine comes.
- `lib`: what they share; `results`: what came of them.

They are scripts, run from the root of a checkout that is installed (`make install`):
`python benchmarks/hardware/gpu.py`.
"""
