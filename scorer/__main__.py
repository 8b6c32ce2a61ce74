"""`prefixrl-scorer`: the frozen target in an engine (none in direct mode), and the verifier."""

from prefixrl.common.worker.command import worker_command

main = worker_command(
    "scorer", "Complete and judge prefixes for the run behind CONNECT until it is over."
)

if __name__ == "__main__":
    main()
