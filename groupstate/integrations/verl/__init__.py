"""groupstate in the place of verl's replay buffer, by two lines of verl's configuration:

    trainer.v1.sampler.custom_sampler.path=pkg://groupstate.integrations.verl
    trainer.v1.sampler.custom_sampler.name=ReplayBuffer

Rule: the core decides what is evicted, refilled and sampled; what is here lists TransferQueue, tells the core what
changed, and does in TransferQueue what was decided.
"""

from groupstate.integrations.verl.buffer import ReplayBuffer, ReplayBufferAsync
from groupstate.integrations.verl.options import BadVerlConfig
from groupstate.integrations.verl.run import NothingToTrainOn, UnknownTag

__all__ = ["BadVerlConfig", "NothingToTrainOn", "ReplayBuffer", "ReplayBufferAsync", "UnknownTag"]
