"""TODO baton/gateway/process"""
