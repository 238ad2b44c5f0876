"""Carries model calls to engines, and on to others when cells change their role."""
