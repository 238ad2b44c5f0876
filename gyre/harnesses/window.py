"""The policy's context window as a harness must know it, so that it compacts its history before a prompt overflows.

Harnesses count what the proxy reports as usage, in tokens of the policy's own tokenizer, and each takes its limits in
another form; the variables below cover the forms seen. Where a harness subtracts a reserve of its own, the profile
gives it the whole window.
"""

import msgspec


class ContextWindow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_context: int
    """Tokens of prompt plus answer that the policy can hold."""
    max_output: int
    """Tokens of one answer."""

    @property
    def compact_at(self) -> int:
        """Tokens of history at which to compact: one answer and a tool result of a fifth of the rest still fit."""
        return (self.max_context - self.max_output) * 4 // 5

    def variables(self) -> dict[str, str]:
        """Launch variables of a profile."""
        values = {
            "max_context": self.max_context,
            "max_output": self.max_output,
            "compact_at": self.compact_at,
            "compact_reserve": self.max_context - self.compact_at,
            "compact_keep": self.max_context // 8,
        }
        return {name: str(value) for name, value in values.items()}


WINDOW_VARIABLES = frozenset(ContextWindow(max_context=0, max_output=0).variables())
