"""The virtual shell: a whole box in virtual time, deterministic from one seed. It must not know clocks, I/O or torch."""
