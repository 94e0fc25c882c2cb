"""Turns written conversations into supervised data, with the same tokens that a rollout of them would have."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tinker
from tinker_local.client.rl.chat import Chat
from tinker_local.client.rl.conversation import Conversation
from tinker_local.client.rl.environment import Message, as_messages
from tinker_local.client.rl.trajectory import Turn, turns_to_data
from tinker_local.types import InvalidRequestError


def conversation_data(
    chat: Chat, messages: Sequence[Mapping[str, Any]], weight: float | Sequence[float] = 1.0
) -> list[tinker.Datum]:
    """A conversation as data for "cross_entropy", trained on the assistant's messages.

    `messages`: {"role": ..., "content": part or parts}. An assistant's message is text, which contains thoughts and
    tool calls as the model writes them. It is trained as the template writes it, with the template's end of turn.
    `weight`: the weight of every token of a reply, one number or one per reply; 0 leaves a reply out. The result is one
    datum if the chat template appends, and one per reply if it rewrites.

    Raises InvalidRequestError if a reply has fields beside its text (tool_calls, reasoning_content), if its thoughts do
    not match the template's generation prompt, or if no message precedes it.
    """
    turns: list[Turn] = []
    conversation: Conversation | None = None
    unseen: list[Message] = []
    for index, message in enumerate(as_messages(list(messages), where="messages")):
        if message.role != "assistant":
            unseen.append(message)
            continue
        if not unseen:
            raise InvalidRequestError(f"messages[{index}]: a reply must follow a message of another role")
        if conversation is None:
            conversation = Conversation(chat, unseen)
        else:
            conversation.observe(unseen)
        unseen = []
        tokens = _tokens(conversation, message, index)
        turn = Turn(conversation.prompt, tokens, np.zeros(len(tokens), np.float32), "", "stop", "")
        turns.append(turn)
        conversation.reply(tokens)
    return turns_to_data(turns, weight, "cross_entropy")


def _tokens(conversation: Conversation, message: Message, index: int) -> tuple[int, ...]:
    if not all(isinstance(part, str) for part in message.parts):
        raise InvalidRequestError(f"messages[{index}]: the assistant's messages are text")
    if lost := [key for key, value in message.further.items() if value]:
        raise InvalidRequestError(
            f"messages[{index}]: {', '.join(lost)}: a reply is trained as the text that the model writes; write calls "
            "and thoughts into content as the model does"
        )
    text = "".join(str(part) for part in message.parts)
    try:
        return tuple(conversation.write(text))
    except InvalidRequestError as error:
        raise type(error)(f"messages[{index}]: {error}") from error
