"""TODO baton/models/layers/moe"""
