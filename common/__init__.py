"""What all processes of prefixrl share: the messages, the transport that carries them, the configuration, the engines.

A small adapter writes the first tokens of an answer, a frozen target continues, a verifier says whether the final answer is
right, and PPO trains the adapter. Each top-level folder is one process; `common` imports none of them, and they know each
other by messages only.

                prompts                                                       frozen target
                   |                                                               |
       broker ── PrefixTask ──▶ rollout           broker ── ScoreTask ──▶ scorer ──┘
         ▲ ▲ ◀── Prefixes ──────┘                    ▲ ◀──── Scores ─────────┘
         │ └── scored groups wait in the ledger ─────┘
         batch of B groups ──▶ learner ranks: advantages → minibatches → version v+1 ──▶ weight server ◀── rollouts

All state is in one place, the broker (`learner/broker/`, a child of the learner): prompts, ledger, leases, the staleness
window, the journal. Rollouts and scorers hold nothing that would be missed; they may be killed and started at any time, on any
node.
A group (one prompt, n prefixes, one version) is the unit of lease, of training and of dropping.

Read in this order: `messages.py` (everything that crosses a socket), `transport.py` (the only importer of zmq), `config.py`
(the one TOML of a run), `errors.py` (what ends a process and with which exit code); then a process: `learner/`, `rollout/`,
`scorer/`.
"""
