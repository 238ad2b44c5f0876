"""The arithmetic of a micro-step: objective, loss, shares of replicas and the pipeline schedule."""
