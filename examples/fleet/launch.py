"""The command of run.py: starts a fleet, trains with it, and says how both went."""

from __future__ import annotations

import no_advice as no_advice  # isort: skip

import argparse
import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from absl import logging as absl_logging

from fleet.audit import Audit
from fleet.processes import Fleet, LaunchError, Runner, Service
from fleet.services import ROUTER, ROUTERS, router_service, worker_services
from fleet.training import train
from hf_folder import write_hf_folder
from lines import Lines
from tunix_sgljax import SglJaxFleetRollout, SglJaxRollout
from tunix_sgljax.training import TrainConfig, load_config
from tunix_sgljax.training.report import StepRecord

ROOT = Path(__file__).resolve().parents[2]
EXIT_INTERRUPTED = 130

_MORE_STEPS = 10_000
"""More than a run of some minutes takes: Tunix's learner stops behind the config's own."""

LIMITS = {"request_timeout_s": 60.0, "sync_timeout_s": 60.0, "outage_timeout_s": 300.0}
"""Fields of FleetConfig. A completion takes seconds here; a worker that starts, about twenty."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the command line's options.

    Raises:
        SystemExit: They contradict each other.
    """
    parser = argparse.ArgumentParser(description="GRPO on addition with a fleet of servers.")
    parser.add_argument("--workers", type=int, default=2, help="servers to start (2)")
    parser.add_argument("--router", choices=("none", *ROUTERS), default="none")
    parser.add_argument(
        "--weights-store", help="folder or fsspec URL of weights; default: one in the output folder"
    )
    parser.add_argument("--model", type=Path, help="of the workers; default: made from the config")
    parser.add_argument("--steps", type=int, help="instead of the config's")
    parser.add_argument("--minutes", type=float, help="train so long instead of so many steps")
    parser.add_argument("--seed", type=int, help="instead of the config's")
    parser.add_argument(
        "--kill-every", type=float, metavar="S", help="kill -9 a random worker every S seconds"
    )
    parser.add_argument("--embedded", action="store_true", help="no fleet: the embedded engine")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/fleet"))
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="instead of the config's: batch_size=4"
    )
    args = parser.parse_args(argv)
    if args.workers < 1:
        parser.error(f"--workers must be at least 1, got {args.workers}")
    for name in ("kill_every", "minutes"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, got {value}")
    if args.embedded and (args.router != "none" or args.kill_every is not None):
        parser.error("--embedded has no servers: it takes neither --router nor --kill-every")
    return args


def read_config(args: argparse.Namespace) -> TrainConfig:
    """Returns the run of grpo_addition.yaml with what the command line changes."""
    steps = args.steps
    if steps is None and args.minutes is not None:
        steps = _MORE_STEPS
    given = {"num_batches": steps, "seed": args.seed, "output_dir": args.output_dir}
    overrides = [f"{key}={value}" for key, value in given.items() if value is not None]
    overrides += args.overrides
    return load_config(ROOT / "configs/grpo_addition.yaml", overrides)


def fleet_services(args: argparse.Namespace, config: TrainConfig, store: str) -> list[Service]:
    """Returns the router, if there is one, and the workers."""
    output = Path(config.output_dir).resolve()
    model = args.model or write_hf_folder(output / "model")
    router = None if args.router == "none" else router_service(args.router)
    workers = worker_services(args.workers, model, store, config.sgljax_config, router)
    return [*([] if router is None else [router]), *workers]


def fleet_rollout(
    services: Sequence[Service], store: str, config: TrainConfig
) -> Callable[..., SglJaxRollout]:
    """Returns the rollout that samples with the services, as Tunix calls it."""
    urls = [service.url for service in services]
    is_routed = services[0].name == ROUTER
    return functools.partial(
        SglJaxFleetRollout,
        fleet={"urls": urls[0] if is_routed else urls, "weights_store": store, **LIMITS},
        random_seed=config.seed,
    )


def summary(
    records: Sequence[StepRecord], audit: Audit, fleet: Runner | None, config: TrainConfig
) -> str:
    """Returns what the run is judged by."""
    rewards = [record.reward for record in records]
    lines = [
        f"steps {len(records)}",
        f"reward {np.mean(rewards[:10]):.3f} of the first ten, "
        f"{np.mean(rewards[-10:]):.3f} of the last ten",
        f"rows {audit.num_rows} "
        f"({config.batch_size * config.num_generations * len(records)} expected)",
        f"rows of wrong versions {audit.wrong_versions}",
        f"rows trained twice {audit.num_trained_twice}",
        f"rows lost {audit.num_lost}",
    ]
    if audit.replicas:
        by_worker = ", ".join(f"{name} {num}" for name, num in sorted(audit.replicas.items()))
        lines.append(f"rows by worker: {by_worker}")
    if fleet is not None:
        lines.append(f"kills {fleet.num_kills}, restarts {fleet.num_restarts}")
    return "\n".join(lines)


def is_right(records: Sequence[StepRecord], audit: Audit, config: TrainConfig) -> bool:
    """Returns whether each row of each step was trained once, with the weights of its step."""
    expected = config.batch_size * config.num_generations * len(records)
    wrong = audit.wrong_versions + audit.num_trained_twice + audit.num_lost
    return bool(records) and wrong == 0 and audit.num_rows == expected


def run(
    args: argparse.Namespace, say: Callable[[str], None], make_fleet: Callable[..., Runner] = Fleet
) -> bool:
    """Runs it all; returns `is_right`.

    Args:
        args: The command line's.
        say: Prints a line.
        make_fleet: Makes what runs the services, from Fleet's arguments.

    Raises:
        LaunchError: A process does not start.
    """
    config = read_config(args)
    output = Path(config.output_dir).resolve()
    store = args.weights_store or str(output / "weights")
    audit = Audit()
    fleet: Runner | None = None
    # Without an engine nobody else asks JAX to keep the trainer's programs.
    jax.config.update("jax_compilation_cache_dir", str(output / "compiled"))
    with contextlib.ExitStack() as ends:
        if args.embedded:
            make_rollout: Callable[..., SglJaxRollout] = functools.partial(
                SglJaxRollout, **config.sgljax_config, random_seed=config.seed
            )
        else:
            services = fleet_services(args, config, store)
            fleet = ends.enter_context(
                make_fleet(
                    services,
                    output / "logs",
                    environment={"JAX_COMPILATION_CACHE_DIR": str(output / "compiled")},
                    kill_every_s=args.kill_every,
                    seed=config.seed,
                    on_event=say,
                )
            )
            say("\n".join(f"{each.name:<8} {each.url}" for each in services))
            say(f"logs     {output / 'logs'}")
            fleet.wait_until_healthy()
            make_rollout = fleet_rollout(services, store, config)

        def on_step(record: StepRecord) -> None:
            if fleet is not None:
                fleet.start_killing()  # behind the first step, which compiles
            say(
                f"step {record.step}  reward {record.reward:.3f}  rollout {record.rollout_s:.1f} s"
                f"  step {record.step_s:.1f} s  weights {record.weight_version}"
            )

        limit_s = None if args.minutes is None else 60 * args.minutes
        records = train(config, make_rollout, audit, on_step, limit_s)
    say(summary(records, audit, fleet, config))
    return is_right(records, audit, config)


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None, make_fleet: Callable[..., Runner] = Fleet) -> int:
    """Runs the command and returns its exit code: 0 where each row was trained once."""
    args = parse_args(argv)
    absl_logging.set_verbosity(absl_logging.ERROR)
    signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        with Lines() as say:
            return 0 if run(args, say, make_fleet) else 1
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
