"""TODO baton/models/families/moe"""
