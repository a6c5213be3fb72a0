"""Processes for Tunix's launcher: a rollout node with this engine, and a trainer that feeds it.

`python -m tunix.experimental.distributed.runtime.main --process_main=...` starts them, see
docs/experimental_sampler.md. They need Tunix's gRPC: `pip install grpcio`.
"""
