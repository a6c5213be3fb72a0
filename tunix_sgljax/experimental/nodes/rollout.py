from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from typing import Any

from tunix.experimental.worker.rollout_worker import (  # pyright: ignore[reportMissingImports]
    RolloutConfig,
)
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.agentic.parser.chat_template_parser import parser as chat_parsers

from sgljax_engine import InvalidConfigError, load_hf_tokenizer
from tunix_sgljax import SglJaxRollout
from tunix_sgljax.experimental import SglJaxRolloutWorker, SglJaxSampler
from tunix_sgljax.experimental.nodes import serving

_PARSERS = {
    "qwen": chat_parsers.QwenChatTemplateParser,
    "llama": chat_parsers.LlamaChatTemplateParser,
    "gemma": chat_parsers.GemmaChatTemplateParser,
}
"""Tunix's chat templates by what a model's name contains."""

_EXAMPLE = "tunix.experimental.examples.math_gsm8k_dist.gsm8k"


def main(argv: Sequence[str], context: Any = None) -> None:
    serving.check_context(context)
    parser = serving.make_parser(
        "Rollout node with the embedded engine", port=20001, worker_id="sgljax-rollout-0"
    )
    parser.add_argument("--registry_module", default=_EXAMPLE, help="registers env and agent")
    parser.add_argument("--env_name", default="gsm8kenv")
    parser.add_argument("--agent_name", default="gsm8kagent")
    parser.add_argument("--max_concurrency", type=int, default=64)
    parser.add_argument(
        "--engine_options", default="{}", help="JSON: keywords of SglJaxRollout by name"
    )
    args = parser.parse_args(argv)
    context.jax.initialize()
    importlib.import_module(args.registry_module)
    worker = make_worker(args)
    try:
        serving.serve(worker, args, context, "rollout")
    finally:
        worker.close()


def make_worker(args: argparse.Namespace) -> SglJaxRolloutWorker:
    """The worker, with the weights of the folder; InvalidConfigError for a wrong argument."""
    mesh = serving.make_mesh(args)
    tokenizer = load_hf_tokenizer(args.tokenizer_path or args.model_dir)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    config = RolloutConfig(
        sampler_type="sgljax",
        env_name=args.env_name,
        agent_name=args.agent_name,
        max_prompt_length=args.max_prompt_length,
        max_tokens_to_generate=args.max_response_length,
        temperature=1.0,
        top_p=1.0,
        return_logprobs=True,
    )
    rollout = SglJaxRollout(
        rollout_actor=serving.load_actor(args, mesh),
        tokenizer=tokenizer,
        mesh=mesh,
        rollout_config=config,
        **{"lora": "merged", **_engine_options(args.engine_options)},  # the sampler stages weights
    )
    return SglJaxRolloutWorker(
        args.worker_id,
        SglJaxSampler(args.worker_id, rollout),
        tokenizer=TokenizerAdapter(tokenizer),
        chat_parser=_chat_parser(args.model_id or args.model_dir, tokenizer),
        config=config,
        max_concurrency=args.max_concurrency,
    )


def _engine_options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except json.JSONDecodeError:
        options = None
    if not isinstance(options, dict):
        raise InvalidConfigError(f"engine_options must be a JSON object, got {text!r}")
    return options


def _chat_parser(name: str, tokenizer: Any) -> Any:
    fitting = [parser for family, parser in _PARSERS.items() if family in name.lower()]
    parser = [*fitting, chat_parsers.DefaultChatTemplateParser][0]
    return parser(tokenizer, enable_thinking=False)
