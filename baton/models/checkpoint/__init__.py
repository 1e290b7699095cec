"""TODO baton/models/checkpoint"""
