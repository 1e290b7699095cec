#!/bin/sh
# Takes the objects that Helm has rendered, and prints them as kustomization.yaml changes them.
set -eu
folder="$(mktemp -d)"
trap 'rm -r "$folder"' EXIT
cp "$(dirname "$0")/kustomization.yaml" "$folder"
cat > "$folder/all.yaml"
kubectl kustomize "$folder"
