#!/usr/bin/env bash
# Two clusters whose nodes differ in cache layout and block size: KV is converted on its way, and the tokens are equal.
#
# BATON_KV_CACHE_LAYOUT sets the layout of a process. A prefill node with heads first in blocks of 16 hands over to a
# decode node with tokens first in blocks of 32, and then the other way round.
set -euo pipefail
model=(${1:+--model "$1"}) # empty: the demo model
port="${PORT:-7000}"
http="127.0.0.1:$((port + 1000))"
prefill="127.0.0.1:$((port + 1))" decode="127.0.0.1:$((port + 2))"
export BATON_TARGET="127.0.0.1:$port"
work="$(mktemp --directory)"
trap 'kill $(jobs -p) 2> /dev/null || true; wait; rm -r "$work"' EXIT

# Starts a cluster, writes its answer to a file, and ends it. Arguments: layout and block size of each node, the file.
answer() {
    BATON_KV_CACHE_LAYOUT="$1" baton prefill-node "${model[@]}" --block-size "$2" --listen "$prefill" &
    BATON_KV_CACHE_LAYOUT="$3" baton decode-node "${model[@]}" --block-size "$4" --listen "$decode" &
    # `strict` sends every prompt to the prefill node, however short it is.
    baton gateway "${model[@]}" --prefill "$prefill" --decode "$decode" --local-policy strict \
        --listen "$BATON_TARGET" --http-listen "$http" &
    until curl --silent --fail --output /dev/null "http://$http/ready"; do
        sleep 1
        kill -0 $! # the gateway ended otherwise: its error is above
    done
    baton generate --max-tokens 24 --temperature 0 "Return the largest item in an iterable" > "$5"
    kill $(jobs -p)
    wait
}

answer HND 16 NHD 32 "$work/one"
answer NHD 32 HND 16 "$work/other"
cat "$work/one"
cmp "$work/one" "$work/other" && echo "both clusters gave the same text"
