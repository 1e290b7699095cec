"""An endpoint picker: a proxy asks it to which of several gateways a request shall go.

It speaks the endpoint picker protocol of the Gateway API Inference Extension over Envoy's external processing.

choice     which gateway, by readiness, load and affinity. Pure
prompt     what a request's body says about that. Pure
exchange   one request's messages. Pure
gateways   finds the gateways, and reads their load
service    serves the protocol
process    the whole program
"""
