"""Reinforcement learning with text and images over several turns, exact to the token.

    chat = rl.Chat.of(training_client)
    groups = [rl.Group(make_environment, size=16, seed=step) for ...]
    rollouts = await rl.rollout(groups, sampling_client, chat, tinker.SamplingParams(max_tokens=64))
    training_client.forward_backward(rollouts.data(), "importance_sampling")

An `Environment` is Gymnasium's interface with text as actions; `GymnasiumEnvironment` adapts Gymnasium's own, and
`tinker_local.client.rl.cookbook` gives environments to the cookbook's `rl.train`.
"""

from tinker_local.client.rl.advantages import Advantages as Advantages
from tinker_local.client.rl.advantages import centered_returns as centered_returns
from tinker_local.client.rl.advantages import centered_returns_to_go as centered_returns_to_go
from tinker_local.client.rl.advantages import normalized_returns as normalized_returns
from tinker_local.client.rl.asynchronous import AsyncStep as AsyncStep
from tinker_local.client.rl.asynchronous import train_asynchronously as train_asynchronously
from tinker_local.client.rl.chat import Chat as Chat
from tinker_local.client.rl.chat import ChatTemplateError as ChatTemplateError
from tinker_local.client.rl.conversation import Conversation as Conversation
from tinker_local.client.rl.demonstrations import conversation_data as conversation_data
from tinker_local.client.rl.environment import Environment as Environment
from tinker_local.client.rl.environment import Group as Group
from tinker_local.client.rl.environment import Observation as Observation
from tinker_local.client.rl.environment import as_messages as as_messages
from tinker_local.client.rl.gymnasium import GymnasiumEnvironment as GymnasiumEnvironment
from tinker_local.client.rl.measures import sampler_trainer_kl as sampler_trainer_kl
from tinker_local.client.rl.progress import RolloutStats as RolloutStats
from tinker_local.client.rl.rollouts import AllTrajectoriesFailedError as AllTrajectoriesFailedError
from tinker_local.client.rl.rollouts import Rollouts as Rollouts
from tinker_local.client.rl.rollouts import rollout as rollout
from tinker_local.client.rl.trajectory import Failure as Failure
from tinker_local.client.rl.trajectory import Trajectory as Trajectory
from tinker_local.client.rl.trajectory import Turn as Turn
from tinker_local.client.rl.trajectory import turns_to_data as turns_to_data
