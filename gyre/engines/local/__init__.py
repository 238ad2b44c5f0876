"""The embedded rollout engine: transformers' continuous batching behind `gyre.engines.base.Engine`.

`worker.main` is the process, `engine.LocalEngine` the engine, `batching` all that touches the library's scheduler.
"""
