"""Model families, their configurations, and loading.

Reading a configuration (`config.reader`), a checkpoint's headers (`weights.checkpoint`) and a model's identity
(`identity`) imports no torch.
"""
