"""The rollout function for miles, slime's fork: see `groupstate.integrations.slime`."""

from groupstate.integrations.slime import RolloutFunction

generate_rollout = RolloutFunction("miles")
