__version__ = "0.3.0"  # checkpoints name it
