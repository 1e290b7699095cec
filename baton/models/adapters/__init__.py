"""LoRA adapters: read and checked on the host, held in slots on the device, and added to a model's linear layers."""
