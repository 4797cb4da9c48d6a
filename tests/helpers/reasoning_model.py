"""A model with a chat template for thinking and function calls."""

from __future__ import annotations

from dataclasses import replace

from baton.cluster.gateway.model import ServedModel
from baton.engine.text import ChatTemplate, Tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>"
    "{% endif %}{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.id }} "
    "{{ call.function.name }} {{ call.function.arguments.size }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
SIZE = {"type": "object", "properties": {"size": {"enum": [1, 2, 3]}}, "required": ["size"]}
TOOLS = [{"type": "function", "name": name, "parameters": SIZE} for name in ("cut", "fold")]
CUT = '<tool_call>\n{"name": "cut", "arguments": {"size": 1}}\n</tool_call>'
FOLD = '<tool_call>\n{"name": "fold", "arguments": {"size": 2}}\n</tool_call>'


def reasoning_model(model: ServedModel, tokenizer: Tokenizer, template: str = TEMPLATE) -> ServedModel:
    taught = Tokenizer(tokenizer.backend, {"eos_token": "<|im_end|>"}, ChatTemplate({"default": template}))
    return replace(model, tokenizer=taught)
