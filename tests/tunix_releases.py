"""What releases of Tunix do differently, where a test has to know it.

Facts of the installed release, or of the checkout that `make test-tunix` puts before it.
"""

from __future__ import annotations

import dataclasses

from tunix.rl.agentic.parser.chat_template_parser.parser import BaseChatTemplateParser
from tunix.rl.grpo.grpo_learner import GRPOConfig

PARSER_ADDS_END_TOKENS = "update_assistant_end_tokens" in vars(BaseChatTemplateParser)
"""Whether the agentic learner asks the chat parser what stands behind an answer. Not in 0.1.7."""

GRPO_USES_ROLLOUT_LOGPS = "use_rollout_logps" in {f.name for f in dataclasses.fields(GRPOConfig)}
"""Whether GRPOLearner takes old log-probs from sampling by default. Not in 0.1.7, which scores."""
