"""The virtual shell: a whole box in virtual time, deterministic from one seed. It knows no clock, no I/O, no torch."""
