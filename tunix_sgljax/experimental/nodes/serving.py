"""What both nodes share: their arguments, their model, and serving a worker until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import pickle
from typing import Any

import grpc
import jax
from flax import nnx
from jax.experimental import mesh_utils
from tunix.experimental.worker.remote_execution import (  # pyright: ignore[reportMissingImports]
    GrpcRemoteExecutionServer,
    _grpc_options,
)

from sgljax_engine import InvalidConfigError
from tunix_sgljax.checkpoints.lora_settings import LoraSettings
from tunix_sgljax.training.lora import apply_lora
from tunix_sgljax.training.models import find_model, load_policy
from tunix_sgljax.training.schema import ModelSection

logger = logging.getLogger(__name__)

_LORA_PATH = ".*q_proj|.*k_proj|.*v_proj|.*o_proj|.*gate_proj|.*down_proj|.*up_proj"
"""Where Tunix's example has LoRA pairs."""


def make_parser(description: str, *, port: int, worker_id: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--port", type=int, default=port, help="of the worker's gRPC server")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; whoever reaches it can run code here, since calls are pickles",
    )
    parser.add_argument("--worker_id", default=worker_id)
    parser.add_argument("--model_dir", required=True, help="a Hugging Face folder")
    parser.add_argument("--model_id", default="", help="a name, for the chat template")
    parser.add_argument("--model_name", default="", help="not needed: the folder has the shape")
    parser.add_argument("--tokenizer_path", default="", help="default: the model's folder")
    parser.add_argument("--dtype", default=None, help="of weights; default: as the folder has it")
    parser.add_argument("--mesh_fsdp", type=int, default=1)
    parser.add_argument("--mesh_tp", type=int, default=None, help="default: all other devices")
    parser.add_argument("--max_prompt_length", type=int, default=512)
    parser.add_argument("--max_response_length", type=int, default=128)
    parser.add_argument("--use_lora", action="store_true")
    parser.add_argument("--lora_rank", type=int, default=16)
    parser.add_argument("--lora_alpha", type=float, default=16.0)
    return parser


def make_mesh(args: argparse.Namespace) -> jax.sharding.Mesh:
    """The mesh of all devices of the process, (fsdp, tp); once JAX is initialised."""
    count = jax.device_count()
    mesh_tp = count // max(args.mesh_fsdp, 1) if args.mesh_tp is None else args.mesh_tp
    shape = args.mesh_fsdp, mesh_tp
    if args.mesh_fsdp * mesh_tp != count:
        raise InvalidConfigError(
            f"mesh_fsdp * mesh_tp must be the number of devices ({count}), got {shape}"
        )
    devices = mesh_utils.create_device_mesh(shape, jax.devices())
    return jax.sharding.Mesh(devices, ("fsdp", "tp"))


def load_actor(args: argparse.Namespace, mesh: jax.sharding.Mesh) -> nnx.Module:
    """The actor, of Tunix's class for the folder's model; with pairs that change nothing yet."""
    section = ModelSection(model_path=args.model_dir, dtype=args.dtype)
    actor = load_policy(section, find_model(section), mesh)
    if not args.use_lora:
        return actor
    pairs = LoraSettings(rank=args.lora_rank, alpha=args.lora_alpha, module_path=_LORA_PATH)
    with mesh:
        return apply_lora(actor, pairs, seed=0)


def check_context(context: Any) -> None:
    """Refuses a start without Tunix's launcher, through which a node is found."""
    if context is None or not context.ipc or not context.ipc.discovery:
        raise InvalidConfigError(
            "a node needs Tunix's launcher: python -m tunix.experimental.distributed.runtime.main "
            "--process_main=<this main> --discovery_addrs=<orchestrator>:<port>"
        )


class NodeServer(GrpcRemoteExecutionServer):
    """Tunix's gRPC server of a worker, on one address; Tunix's own listens on all."""

    def __init__(self, worker: Any, host: str) -> None:
        super().__init__(worker)
        self._host = host

    async def start_serving_async(self, port: int = 50051) -> Any:
        calls = {
            "Execute": self._handle_execute,
            "DispatchTask": self._handle_dispatch_task,
            "PollResponses": self._handle_poll_responses,
        }
        handlers = {name: grpc.unary_unary_rpc_method_handler(do) for name, do in calls.items()}
        service = grpc.method_handlers_generic_handler("tunix.ExecutionService", handlers)
        self._server = grpc.aio.server(options=_grpc_options())
        self._server.add_generic_rpc_handlers((service,))
        self._server.add_insecure_port(f"{self._host}:{port}")
        await self._server.start()
        return self._server


def warn_if_reachable(host: str, port: int) -> None:
    """Warns where other machines may reach a node, which unpickles whatever it gets."""
    try:
        is_loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback:
        logger.warning(
            "--host=%s: whoever reaches port %d can run code in this process, since calls are "
            "pickles and there is no key; use it on a private network only",
            host,
            port,
        )


def serve(worker: Any, args: argparse.Namespace, context: Any, service_type: str) -> None:
    """Serves a worker over gRPC and registers it; until the process is interrupted."""
    warn_if_reachable(args.host, args.port)

    async def run() -> None:
        server = NodeServer(worker, args.host)
        await server.start_serving_async(args.port)
        facts = {
            "service_type": service_type,
            "service_port": args.port,
            "worker_id": args.worker_id,
        }
        try:
            await asyncio.to_thread(context.ipc.discovery.register, metadata=pickle.dumps(facts))
            logger.info("%s %s serves on port %d", service_type, args.worker_id, args.port)
            await asyncio.Event().wait()
        finally:
            await server.stop_serving()

    asyncio.run(run())
