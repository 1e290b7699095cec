"""TODO baton/models/layers"""
