"""TODO baton/gateway/text"""
