"""Sandboxes over images: specifications, the store that builds and keeps them, the provider."""
