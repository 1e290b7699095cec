"""Model families, their configurations and layers, and the loading of checkpoints.

Reading a configuration (`families.reader`), a checkpoint's headers (`checkpoint.checkpoint`) and a model's identity
(`loading.identity`) imports no torch.
"""
