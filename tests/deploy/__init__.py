"""The images and manifests in deploy/: rendered by the real kubectl, held to Kubernetes' schemas and our settings."""
