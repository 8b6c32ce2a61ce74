"""`prefixrl-rollout`: an adapter engine at one version. Stateless: kill and start it freely."""

from prefixrl.common.worker.command import worker_command

main = worker_command("rollout", "Sample prefixes for the run behind CONNECT until it is over.")

if __name__ == "__main__":
    main()
