"""The wire dialects by name."""

from gyre.proxy.dialects.anthropic import AnthropicMessages
from gyre.proxy.dialects.base import Dialect
from gyre.proxy.dialects.chat import ChatCompletions
from gyre.proxy.dialects.responses import Responses

DIALECTS: dict[str, Dialect] = {d.name: d for d in (AnthropicMessages(), ChatCompletions(), Responses())}
