"""Research: the paper's experiments on a modelled workload, and the fit of that model. No other room imports it."""
