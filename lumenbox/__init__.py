"""lumenbox: one language model on every GPU of a box, behind one endpoint whose streams outlive their workers."""

__version__ = "0.1.0"
