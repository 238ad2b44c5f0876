"""Text from outside that goes into a database, a message or a log."""

LONGEST = 2000


def storable(text: str, most: int = LONGEST) -> str:
    """`text` as UTF-8 can hold it, at most `most` characters and a sign that more was there. File names and JSON may
    contain lone surrogates, which no encoder takes; they become escapes."""
    clean = text.encode(errors="backslashreplace").decode()
    return clean if len(clean) <= most else f"{clean[:most]}…"
