"""A model that says what a test wants, with a template that has tools and thoughts."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from tests.server.served import FOLDER

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{{ c.function.arguments['x'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if think %}<think>{% endif %}"
    "{% endif %}{# </think> #}"
)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
]
CALL = '{"name": "add", "arguments": {"x": 1}}'


class ScriptedTokenizer:
    """The golden model's tokenizer, whose decoder writes a text whatever the tokens.

    The model's weights are random: it would never call a tool.

    Attributes:
        text: What is said, a character a token; the tokens' own text if empty.
    """

    def __init__(self) -> None:
        self.text = ""
        self._tokenizer = AutoTokenizer.from_pretrained(FOLDER)
        self._tokenizer.chat_template = TEMPLATE

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: Any, **options: Any) -> str:
        ids = list(ids)
        if not self.text or not options.get("skip_special_tokens", True):
            return self._tokenizer.decode(ids, **options)
        return self.text[: len(ids)]
