"""The part of Envoy's external processing that the endpoint picker speaks."""
