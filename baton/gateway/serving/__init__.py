"""TODO baton/gateway/serving"""
