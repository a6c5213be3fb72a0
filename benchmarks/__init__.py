"""Measurements, in folders by what they measure.

- `throughput`: tokens a second, against peers, and what options cost.
- `interruption`: pauses and new weights, under load.
- `exactness`: log-probs against the trainer's.
- `serving`: what HTTP costs.
- `start_up`: cold and warm starts.
- `hardware`: what a machine can do at best, and how near the engine comes.
- `lib`: what they share; `results`: what came of them.

They are scripts, run from the root of a checkout that is installed (`make install`):
`python benchmarks/throughput/lora.py`.
"""
