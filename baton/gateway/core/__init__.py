"""TODO baton/gateway/core"""
