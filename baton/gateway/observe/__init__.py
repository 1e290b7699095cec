"""TODO baton/gateway/observe"""
