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

wire/        every message, and the sockets that carry them
config/      the run file: sections, keys, reading and checking
prompts/     questions to token ids, and answers back
models/      folders of models, loaded or checked in one way
engines/     models that continue rows of tokens
weights/     snapshots, deltas and shared memory of published weights
worker/      the start of every worker, and its connection to the broker
journal/     what survives a crash of the broker, and the history that it proves
run/         the other files that a run leaves
evaluation/  plans of evaluations, and the figures of judged answers
host/        the machine: signals, logs, GPUs, hub folders, systemd
errors.py    the errors that end a process, and their exit codes
seeds.py     every seed is a hash of the run's seed and its purpose
"""
