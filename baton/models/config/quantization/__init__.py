"""TODO baton/models/config/quantization"""
