"""What happens: the ledger, the controller that runs the rules, the sampler, the rollout, the run (anyio)."""
