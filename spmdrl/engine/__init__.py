"""Engines: what generates. `protocol` says what the rest of the program may ask of one."""
