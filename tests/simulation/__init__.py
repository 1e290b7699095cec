"""The whole cluster in one thread: gateway, two prefill and two decode nodes, with virtual time, and faults that a seed
draws.

The pure parts are the real ones: `RequestMachine`, `Fleet`, `PrefillMachine`, `DecodeMachine`, `Scheduler`,
`LeaseTable`. Processes, network, transport, device and clients are simulated. Invariants I1 to I6 of the design are
checked after every event.

    clock        virtual time: a heap of actions
    network      processes that live, freeze and die; streams that delay, stall and break; segments that get lost
    reference    what one process alone would have computed
    device       one node's scheduler with a cache whose cells know which prefix they stand for
    transfer     KV segments from cache to cache, with the real lease table at the receiver
    decode, prefill, gateway, client    one kind of process each: the shell around its machine
    decode_side  the Decode service of decode nodes, and of prefill nodes that also decode
    scenario     what a seed decides beforehand: sizes, requests, faults
    faults       the table of faults
    invariants   what is checked, and the error that names the invariant
    cluster      builds all of it, runs it to the end, and checks that nothing is left
    many         runs of many seeds in one process
    mutants      planted faults that the simulation must catch

`make simulate SEED=7` replays a seed and prints every event; `make simulate SEEDS=100000` runs that many. `make test`
runs 2,000 seeds and `make test-sweeps` 8,000 further ones.
"""
