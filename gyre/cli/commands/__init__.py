"""One module for each command of `gyre`."""
