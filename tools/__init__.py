"""What a checkout has beside its packages: it looks at engines from outside and serves no rollout.

- `aot`: an engine's programs, compiled for accelerators that are not here.
- `simulation`: how long rollouts would take, with which order and over-sampling.

They are run from the root of a checkout that is installed: `python -m tools.simulation --help`.
"""
