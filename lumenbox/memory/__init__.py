"""Bytes that outlive processes: anonymous shared memory and the descriptors that keep it alive. No tensors here."""
