"""The trajectory plane: from model calls to rows for the trainer. Pure: no I/O, no clock, no asyncio.

Reading order: conversation → render, lexer, syntax, stream_parse (messages ↔ tokens) → canonical, history (is this a
turn we know?) → node, call, checks, tree (prepare, commit, records) → roles → admission → rows, advantage → packing →
microstep.
"""
