"""SGLang servers as Gyre engines: HTTP to a running server, nothing of SGLang is imported.

Written against SGLang 0.5.23. The contract tests run against a server that speaks its wire format
(`tests/engines/sglang_stub.py`), not against SGLang itself; what that cannot show: real freeing of device memory, the
server's own scheduling, and its exact error texts.
"""
