#!/usr/bin/env bash
# One prefill node on GPU 0, one decode node on GPU 1, and a gateway; Ctrl-C ends all three.
#
#   examples/two_gpus.sh [MODEL]        a directory or a name on the Hugging Face hub
#
# Without GPUs, both nodes compute on the CPU. `baton up --model MODEL` does the same in one command; here you see what
# runs. On two machines, run each command on its own machine, with --listen and --advertise: docs/usage.md.
set -euo pipefail
model=(${1:+--model "$1"}) # empty: the demo model
port="${PORT:-7000}"
http="127.0.0.1:$((port + 1000))"
prefill="127.0.0.1:$((port + 1))" decode="127.0.0.1:$((port + 2))"
trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT

CUDA_VISIBLE_DEVICES=0 baton prefill-node "${model[@]}" --listen "$prefill" &
CUDA_VISIBLE_DEVICES=1 baton decode-node "${model[@]}" --listen "$decode" &
baton gateway "${model[@]}" --prefill "$prefill" --decode "$decode" --listen "127.0.0.1:$port" --http-listen "$http" &

until curl --silent --fail --output /dev/null "http://$http/ready"; do
    sleep 1
    kill -0 $! # the gateway ended otherwise: its error is above
done
export BATON_TARGET="127.0.0.1:$port"
baton status
baton generate --max-tokens 16 "Return the"
[ -n "${ONCE:-}" ] || wait # ONCE=1 ends here
