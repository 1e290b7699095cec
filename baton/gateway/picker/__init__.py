"""An endpoint picker: chooses the gateway that serves a request, for a proxy that asks.

It implements the endpoint picker protocol of the Gateway API Inference Extension, over Envoy's external processing.

choice     chooses a gateway by readiness, load and affinity. Pure
prompt     reads the conversation's key and the size from a request's body. Pure
exchange   handles the messages about one request. Pure
gateways   finds the gateways, and polls their load
process    the service and the whole program
"""
