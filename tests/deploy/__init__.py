"""Tests of deploy/: the real kubectl renders the manifests; Kubernetes' schemas and our settings check them."""
