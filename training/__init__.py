__version__ = "0.1.0"  # what checkpoints say of the code that wrote them
