"""TODO baton/gateway/fleet"""
