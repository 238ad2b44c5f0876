"""Chat templates: messages to token ids, and sampled ids back to a turn. Pure: no I/O, no clock, no asyncio.

Reading order: conversation → families, wire, render (messages → ids) → lexer, syntax, stream_parse (ids → turn, while
it is sampled) → canonical (are two messages the same turn?).
"""
