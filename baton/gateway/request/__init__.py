"""TODO baton/gateway/request"""
