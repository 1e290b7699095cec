"""TODO baton/client"""
