"""SGLang servers as Gyre engines: a child process behind HTTP, nothing of SGLang is imported. Written for 0.5.23.

`server` starts it, `client` speaks to it, `wire` and `calls` turn its streams into chunks, `weights` lays out what it
loads, `engine` keeps the contract, `worker` is the process. docs/engines.md says what ran where.
"""
