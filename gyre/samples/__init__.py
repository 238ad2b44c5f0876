"""From trajectory trees to training samples. Pure: no I/O, no clock, no asyncio.

Reading order: admission (which paths train, and on which tokens) → rows, advantage → prefixes, packing → microstep.
"""
