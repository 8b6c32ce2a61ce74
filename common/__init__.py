"""Everything that processes of prefixrl share: messages, configuration, engines, weights.

A small adapter writes the first tokens of an answer, a frozen target continues, a verifier decides whether the final
answer is right, and PPO trains the adapter. Each other top-level folder is one process (`deploy/` is the operator's
side); `common` imports none of them, and they know each other by messages only.

                prompts                                                       frozen target
                   |                                                               |
       broker ── PrefixTask ──▶ rollout           broker ── ScoreTask ──▶ scorer ──┘
         ▲ ▲ ◀── Prefixes ──────┘                    ▲ ◀──── Scores ─────────┘
         │ └── scored groups wait in the ledger ─────┘
         batch of B groups ──▶ learner ranks: advantages → minibatches → version v+1 ──▶ weight server ◀── rollouts

One process holds all state, the broker (`learner/broker/`, a child of the learner): prompts, ledger, leases, the
staleness window, the journal. Rollouts and scorers hold none; they may be killed and started at any time, on any node.
A group (one prompt, n prefixes, one version) is the unit of lease, of training and of dropping.

errors.py   the errors that end a process, and their exit codes
wire/       every message, and the sockets that carry them
config/     the run file: sections, keys, reading and checking
seeds.py    every seed is a hash of the run's seed and its purpose
run/        the files that a run leaves
weights/    snapshots, deltas and shared memory of published weights
engines/    models that continue rows of tokens, prompts in and answers out
worker/     the start of every worker, and its connection to the broker
evaluation/  judged rows and their figures
host/        the machine that a process runs on
journal/     the journal of a run, and the history that it proves
prompts/     questions as a model is asked them, and answers as they are read
"""
