"""Files and programs of the machine."""
