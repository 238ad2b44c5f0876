"""Ids, namespaces, system calls and the way to the proxy."""
