"""TODO baton/core"""
